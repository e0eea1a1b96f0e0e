/* What PyTorch has no fast way to say on a CPU. Compiled on first use by `library.py`, which also says what every
 * function is for; each has a counterpart in PyTorch or NumPy that is used where there is no compiler.
 *
 * Vectors are sixteen floats wide, which a compiler splits where a processor's are narrower. `narrow` is bfloat16.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define WIDTH 16
#define MOST_QUERIES 16 /* that share a key/value head */
#define MOST_VECTORS 8  /* of a head: 128 numbers */
#define AT_ONCE 512     /* tokens whose scores are held */

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint16_t shorts __attribute__((vector_size(32)));

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

INLINE vec load(const void *from, int narrow) {
    if (narrow) {
        shorts bits;
        memcpy(&bits, from, sizeof bits);
        return (vec)(__builtin_convertvector(bits, ints) << 16);
    }
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE float number(const void *from, int64_t index, int narrow) {
    if (!narrow) return ((const float *)from)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void store(void *to, int64_t index, float value, int narrow) {
    if (!narrow) {
        ((float *)to)[index] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t *)to)[index] = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16); /* to the nearest, ties to even */
}

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
INLINE vec join1(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
INLINE vec join2(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
INLINE vec join4(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
INLINE vec join8(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

/* ---- attention over pages --------------------------------------------------------------------------------------- */

/* A layer's pages: [pages, kv_heads, page_size, 2 * size], a token's key and value side by side. */

INLINE vec four_scores(const char *key, int64_t stride, const vec *q, int V, int narrow) {
    vec sums[4];
    UNROLL for (int i = 0; i < 4; i++) {
        sums[i] = q[0] * load(key + i * stride, narrow);
        UNROLL for (int v = 1; v < V; v++) sums[i] += q[v] * load(key + i * stride + v * WIDTH * (narrow ? 2 : 4), narrow);
    }
    return join2(join1(sums[0], sums[1]), join1(sums[2], sums[3]));
}

/* G queries, of V vectors each, over tokens [low, end) of one sequence and one key/value head, whose first page begins at
 * `pages`. The softmax is taken piece by piece: what was summed is scaled again when a greater score comes. */
INLINE void attend(int V, int G, int narrow, const char *pages, const int32_t *table, int low, int end, int page_size,
                   int64_t page_bytes, const vec *q, vec *out) {
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
                vec sixteen = join8(join4(a, b), join4(c, d));
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

typedef void attention(int, const char *, const int32_t *, int, int, int, int64_t, const vec *, vec *);

/* As many queries at a time as registers hold sums for. */
#define ATTENTION(NAME, V, NARROW)                                                                                          \
    static void NAME(int G, const char *pages, const int32_t *table, int low, int end, int page_size, int64_t page_bytes,   \
                     const vec *q, vec *out) {                                                                              \
        for (; V <= 4 && G >= 4; G -= 4, q += 4 * V, out += 4 * V)                                                          \
            attend(V, 4, NARROW, pages, table, low, end, page_size, page_bytes, q, out);                                    \
        for (; G >= 2; G -= 2, q += 2 * V, out += 2 * V)                                                                    \
            attend(V, 2, NARROW, pages, table, low, end, page_size, page_bytes, q, out);                                    \
        if (G) attend(V, 1, NARROW, pages, table, low, end, page_size, page_bytes, q, out);                                 \
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
        const int head = item / n, row = item % n;
        const int64_t from = row * q_stride + (int64_t)head * G * size, to = ((int64_t)row * heads + head * G) * size;
        vec queries[MOST_QUERIES * MOST_VECTORS], seen[MOST_QUERIES * MOST_VECTORS];
        for (int e = 0; e < G * size; e++) ((float *)queries)[e] = number(q, from + e, narrow) * scale;
        run(G, (const char *)kv + head * head_bytes, table + slots[row] * table_stride, (int)lows[row], (int)ends[row],
            page_size, kv_heads * head_bytes, queries, seen);
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

/* ---- fingerprints ----------------------------------------------------------------------------------------------- */

/* The sum of elements [first, first + n) of a tensor times their keys, modulo 2^64. Element i has the key keys[i % run] times
 * factors[i / run], which are counted from the run of `first`. Elements are unsigned and have `width` bytes. */
uint64_t tidemill_keyed_sum(const void *elements, int width, int64_t n, int64_t first, const uint64_t *keys, int64_t run,
                            const uint64_t *factors) {
    uint64_t total = 0;
    for (int64_t at = 0; at < n; factors++) {
        const int64_t begin = (first + at) % run, count = n - at < run - begin ? n - at : run - begin;
        const uint64_t *key = keys + begin;
        uint64_t sum = 0;
        if (width == 1)
            for (int64_t i = 0; i < count; i++) sum += ((const uint8_t *)elements)[at + i] * key[i];
        else if (width == 2)
            for (int64_t i = 0; i < count; i++) sum += ((const uint16_t *)elements)[at + i] * key[i];
        else
            for (int64_t i = 0; i < count; i++) sum += ((const uint32_t *)elements)[at + i] * key[i];
        total += sum * *factors;
        at += count;
    }
    return total;
}

/* The sum of bytes as little-endian words of eight, modulo 2^64; the last may be short. */
uint64_t tidemill_word_sum(const char *bytes, int64_t n) {
    uint64_t sum = 0, rest = 0;
    for (int64_t i = 0; i < n / 8; i++) {
        uint64_t word;
        memcpy(&word, bytes + 8 * i, 8);
        sum += word;
    }
    memcpy(&rest, bytes + n / 8 * 8, n % 8);
    return sum + rest;
}
