/* What PyTorch has no fast way to say on a CPU. Compiled on first use by `library.py`, which also says what every
 * function is for; each has a counterpart in PyTorch or NumPy that is used where there is no compiler.
 */

#include "vectors.h"

#include <math.h>

#define PIECE 256 /* numbers that are gated at a time */

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
