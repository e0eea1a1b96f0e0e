/* What PyTorch has no fast way to say on a CPU. Compiled on first use by `library.py`, which also says what every
 * function is for; each has a counterpart in PyTorch or NumPy that is used where there is no compiler.
 */

#include "vectors.h"

#include <math.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define MOST_QUERIES 16 /* that share a key/value head */
#define MOST_VECTORS 8  /* of a head: 128 numbers */
#define AT_ONCE 512     /* tokens whose scores are held */
#define PIECE 256       /* numbers that are gated at a time */

/* e^x for x <= 0, to two units in the last place: 2^n times a polynomial in what is left (Cephes, expf). */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(x * 1.44269504088896341f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* Sixteen sums over lanes at once: each step adds the halves of two vectors and leaves one. */
INLINE vec join1(vec a, vec b) { return EVEN1(a, b) + ODD1(a, b); }
INLINE vec join2(vec a, vec b) { return EVEN2(a, b) + ODD2(a, b); }
INLINE vec join4(vec a, vec b) { return EVEN4(a, b) + ODD4(a, b); }
INLINE vec join8(vec a, vec b) { return EVEN8(a, b) + ODD8(a, b); }

/* ---- attention over pages --------------------------------------------------------------------------------------- */

/* A layer's pages: [pages, kv_heads, page_size, 2 * size], a token's key and value side by side. */

/* The products of a query with four tokens' keys, added up in each fourth of the lanes. Where the processor multiplies
 * bfloat16 itself, a query is V / 2 vectors of them, else V vectors of floats: `as_query` makes either. */
INLINE vec four_scores(const char *key, int64_t stride, const vec *q, int V, int narrow) {
    vec sums[4];
#ifdef __AVX512BF16__
    if (narrow && V % 2 == 0) {
        UNROLL for (int i = 0; i < 4; i++) {
            __m512 sum = _mm512_setzero_ps();
            UNROLL for (int v = 0; v < V / 2; v++)
                sum = _mm512_dpbf16_ps(sum, (__m512bh)q[v], (__m512bh)_mm512_loadu_si512(key + i * stride + v * sizeof(vec)));
            sums[i] = (vec)sum;
        }
        return join2(join1(sums[0], sums[1]), join1(sums[2], sums[3]));
    }
#endif
    UNROLL for (int i = 0; i < 4; i++) {
        sums[i] = q[0] * load(key + i * stride, narrow);
        UNROLL for (int v = 1; v < V; v++) sums[i] += q[v] * load(key + i * stride + v * WIDTH * (narrow ? 2 : 4), narrow);
    }
    return join2(join1(sums[0], sums[1]), join1(sums[2], sums[3]));
}

INLINE void as_query(const void *from, int64_t at, int V, int narrow, vec *q) {
#ifdef __AVX512BF16__
    if (narrow && V % 2 == 0) {
        memcpy(q, (const uint16_t *)from + at, V * sizeof(vec) / 2);
        return;
    }
#endif
    UNROLL for (int v = 0; v < V; v++) q[v] = load((const char *)from + (at + v * WIDTH) * (narrow ? 2 : 4), narrow);
}

/* G queries, of V vectors each, over tokens [low, end) of one sequence and one key/value head, whose first page begins at
 * `pages`. The softmax is taken piece by piece: what was summed is scaled again when a greater score comes. */
INLINE void attend(int V, int G, int narrow, const char *pages, const int32_t *table, int low, int end, int page_size,
                   int64_t page_bytes, const void *queries, int64_t from, float scale, vec *out) {
    vec q[G * V];
    UNROLL for (int g = 0; g < G; g++) as_query(queries, from + g * V * WIDTH, V, narrow, q + g * V);
    const int width = narrow ? 2 : 4;
    const int64_t stride = 2 * V * WIDTH * width;
    float scores[G][AT_ONCE] __attribute__((aligned(64))), greatest[G], total[G];
    for (int g = 0; g < G; g++) greatest[g] = -INFINITY, total[g] = 0;
    for (int i = 0; i < G * V; i++) out[i] = (vec){0};
    for (int first = low / WIDTH * WIDTH; first < end; first += AT_ONCE) {
        const int skip = first < low ? low - first : 0, count = end - first < AT_ONCE ? end - first : AT_ONCE;
        for (int at = 0; at < count; at += WIDTH) { /* a page holds a multiple of these; what lies behind `end` is not used */
            const char *key = pages + table[(first + at) / page_size] * page_bytes + (first + at) % page_size * stride;
            for (int g = 0; g < G; g++) {
                vec a = four_scores(key, stride, q + g * V, V, narrow);
                vec b = four_scores(key + 4 * stride, stride, q + g * V, V, narrow);
                vec c = four_scores(key + 8 * stride, stride, q + g * V, V, narrow);
                vec d = four_scores(key + 12 * stride, stride, q + g * V, V, narrow);
                vec sixteen = join8(join4(a, b), join4(c, d)) * scale;
                memcpy(&scores[g][at], &sixteen, sizeof sixteen);
            }
        }
        for (int g = 0; g < G; g++) {
            float high = greatest[g], sum = 0;
            _Pragma("omp simd reduction(max : high)") for (int t = skip; t < count; t++)
                high = scores[g][t] > high ? scores[g][t] : high;
            _Pragma("omp simd reduction(+ : sum)") for (int t = skip; t < count; t++) {
                scores[g][t] = exponential(scores[g][t] - high);
                sum += scores[g][t];
            }
            const float before = exponential(greatest[g] - high);
            total[g] = total[g] * before + sum;
            greatest[g] = high;
            for (int v = 0; v < V; v++) out[g * V + v] *= before;
        }
        vec sums[G * V];
        UNROLL for (int i = 0; i < G * V; i++) sums[i] = out[i];
        for (int at = skip; at < count;) {
            const int offset = (first + at) % page_size;
            const int stop = at + page_size - offset < count ? at + page_size - offset : count;
            const char *value = pages + table[(first + at) / page_size] * page_bytes + offset * stride + stride / 2;
            for (; at < stop; at++, value += stride)
                UNROLL for (int v = 0; v < V; v++) {
                    const vec part = load(value + v * WIDTH * width, narrow);
                    UNROLL for (int g = 0; g < G; g++) sums[g * V + v] += scores[g][at] * part;
                }
        }
        UNROLL for (int i = 0; i < G * V; i++) out[i] = sums[i];
    }
    for (int g = 0; g < G; g++)
        for (int v = 0; v < V; v++) out[g * V + v] /= total[g];
}

typedef void attention(int, const char *, const int32_t *, int, int, int, int64_t, const void *, int64_t, float, vec *);

/* As many queries at a time as registers hold sums for. */
#define ATTENTION(NAME, V, NARROW)                                                                                          \
    static void NAME(int G, const char *pages, const int32_t *table, int low, int end, int page_size, int64_t page_bytes,   \
                     const void *q, int64_t at, float scale, vec *out) {                                                    \
        for (; V <= 4 && G >= 4; G -= 4, at += 4 * V * WIDTH, out += 4 * V)                                                 \
            attend(V, 4, NARROW, pages, table, low, end, page_size, page_bytes, q, at, scale, out);                         \
        for (; G >= 2; G -= 2, at += 2 * V * WIDTH, out += 2 * V)                                                           \
            attend(V, 2, NARROW, pages, table, low, end, page_size, page_bytes, q, at, scale, out);                         \
        if (G) attend(V, 1, NARROW, pages, table, low, end, page_size, page_bytes, q, at, scale, out);                      \
    }
ATTENTION(wide_16, 1, 0)
ATTENTION(wide_32, 2, 0)
ATTENTION(wide_64, 4, 0)
ATTENTION(wide_128, 8, 0)
ATTENTION(narrow_16, 1, 1)
ATTENTION(narrow_32, 2, 1)
ATTENTION(narrow_64, 4, 1)
ATTENTION(narrow_128, 8, 1)

static attention *attention_for(int size, int narrow) {
    switch (size) {
    case 16: return narrow ? narrow_16 : wide_16;
    case 32: return narrow ? narrow_32 : wide_32;
    case 64: return narrow ? narrow_64 : wide_64;
    case 128: return narrow ? narrow_128 : wide_128;
    default: return 0;
    }
}

/* q [n, heads, size] with `q_stride` numbers from row to row, out [n, heads, size] dense. Row r is sequence slots[r], which
 * sees tokens [lows[r], ends[r]). 0, or 1 when these sizes are not provided for. */
int tidemill_attend(const void *kv, int narrow, const void *q, int64_t q_stride, void *out, const int32_t *table,
                    int64_t table_stride, const int64_t *slots, const int64_t *lows, const int64_t *ends, int n, int heads,
                    int kv_heads, int size, int page_size, float scale, int threads) {
    const int G = heads / kv_heads;
    const int64_t head_bytes = (int64_t)page_size * 2 * size * (narrow ? 2 : 4);
    attention *run = attention_for(size, narrow);
    if (!run || G > MOST_QUERIES || page_size % WIDTH) return 1;
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads)
    for (int item = 0; item < n * kv_heads; item++) { /* rows of one head follow one another: siblings share pages */
        const int head = item % kv_heads, row = item / kv_heads;
        const int64_t from = row * q_stride + (int64_t)head * G * size, to = ((int64_t)row * heads + head * G) * size;
        vec seen[MOST_QUERIES * MOST_VECTORS];
        run(G, (const char *)kv + head * head_bytes, table + slots[row] * table_stride, (int)lows[row], (int)ends[row],
            page_size, kv_heads * head_bytes, q, from, scale, seen);
        for (int e = 0; e < G * size; e++) store(out, to + e, ((float *)seen)[e], narrow);
    }
    return 0;
}

/* Keys and values [n, kv_heads, size] of `width` bytes a number go to places `writes` (page * page_size + offset). */
void tidemill_write(void *kv, int width, const void *k, int64_t k_stride, const void *v, int64_t v_stride,
                    const int64_t *writes, int n, int kv_heads, int size, int page_size) {
    const int64_t bytes = (int64_t)size * width;
    for (int row = 0; row < n; row++)
        for (int head = 0; head < kv_heads; head++) {
            const int64_t page = writes[row] / page_size, offset = writes[row] % page_size;
            char *to = (char *)kv + ((page * kv_heads + head) * page_size + offset) * 2 * bytes;
            memcpy(to, (const char *)k + (row * k_stride + head * size) * width, bytes);
            memcpy(to + bytes, (const char *)v + (row * v_stride + head * size) * width, bytes);
        }
}

/* ---- what lies between the matrix products --------------------------------------------------------------------- */

/* One row of a root-mean-square norm, in float32: x * rsqrt(mean(x^2) + eps) * weight. A narrow result is rounded before the
 * weight is applied, and after, as the models of this family were trained. */
INLINE void norm_row(float *x, const float *weight, float eps, int size, int narrow) {
    float sum = 0;
    _Pragma("omp simd reduction(+ : sum)") for (int i = 0; i < size; i++) sum += x[i] * x[i];
    const float scale = 1.0f / __builtin_sqrtf(sum / (float)size + eps);
    for (int i = 0; i < size; i++) x[i] *= scale;
    round_off(x, size, narrow);
    for (int i = 0; i < size; i++) x[i] *= weight[i];
}

INLINE void norm_rows(const void *x, int64_t stride, const void *weight, float eps, void *out, int n, int size, int narrow,
                      int threads) {
    float weights[size];
    widen(weight, 0, size, narrow, weights);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int row = 0; row < n; row++) {
        float wide[size];
        widen(x, row * stride, size, narrow, wide);
        norm_row(wide, weights, eps, size, narrow);
        put(wide, size, narrow, out, (int64_t)row * size);
    }
}

/* x [n, size] with `stride` numbers from row to row; out dense. */
void tidemill_norm(const void *x, int64_t stride, int narrow, const void *weight, float eps, void *out, int n, int size,
                   int threads) {
    if (narrow)
        norm_rows(x, stride, weight, eps, out, n, size, 1, threads);
    else
        norm_rows(x, stride, weight, eps, out, n, size, 0, threads);
}

INLINE void rotate_rows(const void *x, int64_t stride, const void *q_weight, const void *k_weight, float eps, const void *cos,
                        const void *sin, void *out, int n, int heads, int q_heads, int size, int narrow, int threads) {
    const int half = size / 2;
    float q_weights[size], k_weights[size];
    if (q_weight) widen(q_weight, 0, size, narrow, q_weights), widen(k_weight, 0, size, narrow, k_weights);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int row = 0; row < n; row++) {
        float wide[size], turned[size], c[half], s[half];
        widen(cos, (int64_t)row * half, half, narrow, c);
        widen(sin, (int64_t)row * half, half, narrow, s);
        for (int head = 0; head < heads; head++) {
            widen(x, row * stride + (int64_t)head * size, size, narrow, wide);
            if (q_weight) {
                norm_row(wide, head < q_heads ? q_weights : k_weights, eps, size, narrow);
                round_off(wide, size, narrow);
            }
            for (int i = 0; i < half; i++) {
                turned[i] = wide[i] * c[i] - wide[i + half] * s[i];
                turned[i + half] = wide[i + half] * c[i] + wide[i] * s[i];
            }
            put(turned, size, narrow, out, ((int64_t)row * heads + head) * size);
        }
    }
}

/* The first `heads` heads of each row of x, of which `q_heads` are queries and the others keys: normed where there are
 * weights, and turned by the angles of their position, cos and sin [n, size / 2], in halves. out [n, heads, size] dense. */
void tidemill_rotate(const void *x, int64_t stride, int narrow, const void *q_weight, const void *k_weight, float eps,
                     const void *cos, const void *sin, void *out, int n, int heads, int q_heads, int size, int threads) {
    if (narrow)
        rotate_rows(x, stride, q_weight, k_weight, eps, cos, sin, out, n, heads, q_heads, size, 1, threads);
    else
        rotate_rows(x, stride, q_weight, k_weight, eps, cos, sin, out, n, heads, q_heads, size, 0, threads);
}

INLINE void gate_rows(const void *x, void *out, int n, int size, int narrow, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int row = 0; row < n; row++)
        for (int at = 0; at < size; at += PIECE) {
            const int count = size - at < PIECE ? size - at : PIECE;
            const int64_t from = (int64_t)row * 2 * size + at;
            float room[3][PIECE], *to = narrow ? room[2] : (float *)out + (int64_t)row * size + at;
            const float *gates = narrow ? room[0] : (const float *)x + from, *ups = narrow ? room[1] : gates + size;
            if (narrow) widen(x, from, count, 1, room[0]), widen(x, from + size, count, 1, room[1]);
            for (int i = 0; i < count; i++) {
                const float gate = gates[i], e = exponential(gate < 0 ? gate : -gate), share = 1.0f / (1.0f + e);
                to[i] = gate * (gate < 0 ? e * share : share) * ups[i];
            }
            if (narrow) put(to, count, 1, out, (int64_t)row * size + at);
        }
}

/* x [n, 2 * size], gate and up side by side: out [n, size] = gate * sigmoid(gate) * up. */
void tidemill_gate(const void *x, int narrow, void *out, int n, int size, int threads) {
    if (narrow)
        gate_rows(x, out, n, size, 1, threads);
    else
        gate_rows(x, out, n, size, 0, threads);
}

/* ---- sampling --------------------------------------------------------------------------------------------------- */

#define BLOCK 256 /* tokens of the vocabulary whose weights are added in float32 before they are in float64 */

INLINE float weight_of(float logit, float most, float sharpness) {
    const float x = (logit - most) * sharpness;
    return x < -87.0f ? 0.0f : exponential(x); /* a NaN stays one */
}

/* The sum of e^(sharpness * (logit - most)) over a row; that of each block goes to `sums`. */
INLINE double total_weight(const float *logits, int vocab, float most, float sharpness, double *sums) {
    double total = 0;
    for (int from = 0; from < vocab; from += BLOCK) {
        const int to = from + BLOCK < vocab ? from + BLOCK : vocab;
        float sum = 0;
        _Pragma("omp simd reduction(+ : sum)") for (int i = from; i < to; i++) sum += weight_of(logits[i], most, sharpness);
        total += sum;
        sums[from / BLOCK] = sum;
    }
    return total;
}

/* One token for each row of logits [n, vocab], and its logprob where it was drawn and in the model itself. It is the first
 * whose cumulative weight exceeds `uniform` of the total, at sharpness 1 / temperature; at 0 it is the likeliest, with
 * certainty. */
void tidemill_sample(const float *logits, int n, int vocab, const float *sharpness, const double *uniform, int64_t *tokens,
                     float *logprobs, float *model_logprobs, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int row = 0; row < n; row++) {
        const float *x = logits + (int64_t)row * vocab, sharp = sharpness[row];
        double sums[(vocab + BLOCK - 1) / BLOCK];
        float most = -INFINITY;
        _Pragma("omp simd reduction(max : most)") for (int i = 0; i < vocab; i++) most = x[i] > most ? x[i] : most;
        const double model = total_weight(x, vocab, most, 1.0f, sums);
        int token = 0;
        if (sharp == 0) {
            while (token < vocab - 1 && x[token] != most) token++;
            logprobs[row] = 0;
        } else {
            const double total = sharp == 1 ? model : total_weight(x, vocab, most, sharp, sums);
            double left = uniform[row] * total;
            int block = 0, last = (vocab - 1) / BLOCK;
            while (last > 0 && sums[last] == 0) last--;
            while (block < last && left >= sums[block]) left -= sums[block++];
            const int end = (block + 1) * BLOCK < vocab ? (block + 1) * BLOCK : vocab;
            int likely = -1; /* the last one seen that can be drawn: where rounding leaves nothing to exceed */
            for (token = block * BLOCK; token < end; token++) {
                const float w = weight_of(x[token], most, sharp);
                if (w > 0) likely = token;
                if (left < w) break;
                left -= w;
            }
            if (token == end) token = likely >= 0 ? likely : end - 1;
            logprobs[row] = (float)((double)(x[token] - most) * sharp - log(total));
        }
        model_logprobs[row] = (float)((double)(x[token] - most) - log(model));
        tokens[row] = token;
    }
}

/* ---- fingerprints ----------------------------------------------------------------------------------------------- */

enum { PART = 2048 }; /* elements that are looked at twice while the first cache holds them */

static uint64_t keyed(const void *elements, int width, int64_t at, const uint64_t *key, int64_t count) {
    uint64_t sum = 0;
    if (width == 1)
        for (int64_t i = 0; i < count; i++) sum += ((const uint8_t *)elements)[at + i] * key[i];
    else if (width == 2)
        for (int64_t i = 0; i < count; i++) sum += ((const uint16_t *)elements)[at + i] * key[i];
    else
        for (int64_t i = 0; i < count; i++) sum += ((const uint32_t *)elements)[at + i] * key[i];
    return sum;
}

/* The sum of bytes as little-endian words of four, modulo 2^64; the last may be short. */
uint64_t tidemill_word_sum(const char *bytes, int64_t n) {
    uint64_t sum = 0;
    uint32_t word = 0;
    for (int64_t i = 0; i < n / 4; i++) {
        memcpy(&word, bytes + 4 * i, 4);
        sum += word;
    }
    word = 0;
    memcpy(&word, bytes + n / 4 * 4, n % 4);
    return sum + word;
}

/* The sum of elements [first, first + n) of a tensor times their keys, modulo 2^64. Element i has the key keys[i % run] times
 * factors[i / run], which are counted from the run of `first`. Elements are unsigned and have `width` bytes. Where
 * `words` is given, it becomes the sum of their words, in the same pass over memory. */
uint64_t tidemill_keyed_sum(const void *elements, int width, int64_t n, int64_t first, const uint64_t *keys, int64_t run,
                            const uint64_t *factors, uint64_t *words) {
    const char *bytes = elements;
    uint64_t total = 0, seen = 0;
    int64_t done = 0; /* bytes of whole words that are in `seen` */
    for (int64_t at = 0; at < n; factors++) {
        const int64_t begin = (first + at) % run, count = n - at < run - begin ? n - at : run - begin;
        uint64_t sum = 0;
        for (int64_t i = 0; i < count; i += PART) {
            const int64_t here = count - i < PART ? count - i : PART;
            sum += keyed(elements, width, at + i, keys + begin + i, here);
            if (words) {
                const int64_t end = (at + i + here) * width / 4 * 4;
                seen += tidemill_word_sum(bytes + done, end - done);
                done = end;
            }
        }
        total += sum * *factors;
        at += count;
    }
    if (words) *words = seen + tidemill_word_sum(bytes + done, n * width - done);
    return total;
}
