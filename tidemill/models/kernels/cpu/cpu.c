/* Sampling and fingerprints on a CPU, where PyTorch has no fast form of them. `compilation.py` compiles all files on first use;
 * `bindings.py` documents every function. Each has a counterpart in PyTorch or NumPy for machines without a compiler.
 */

#include "vectors.h"

#include <math.h>

/* ---- sampling --------------------------------------------------------------------------------------------------- */

#define BLOCK 256 /* tokens whose weights are summed in float32; such sums are summed in float64 */

INLINE float weight_of(float logit, float most, float sharpness) {
    const float x = (logit - most) * sharpness;
    return x < -87.0f ? 0.0f : exponential(x); /* a NaN stays one */
}

/* Sum of e^(sharpness * (logit - most)) over a row; `sums` gets the sum of each block. */
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

/* Draws one token for each row of logits [n, vocab], with its logprob in the sampled distribution and in the model's. It is the
 * first token whose cumulative weight, at sharpness 1 / temperature, exceeds the fraction `uniform` of the total. At sharpness 0
 * it is the likeliest. */
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
            int likely = -1; /* the last token that can be drawn, in case rounding leaves none above the limit */
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

static uint64_t word_sum(const char *bytes, int64_t n) {
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

/* Sum of bytes as little-endian words of four bytes, modulo 2^64; the last word may be short. */
uint64_t tidemill_word_sum(const char *bytes, int64_t n, int threads) {
    uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        const int64_t from = n / 4 * part / threads * 4, to = part + 1 < threads ? n / 4 * (part + 1) / threads * 4 : n;
        sum += word_sum(bytes + from, to - from);
    }
    return sum;
}

enum {
    PART = 2048,  /* elements at a time: with their keys they fit the first-level cache */
    TOGETHER = 8, /* runs for which a part of the keys is read once */
};

/* Sum of `count` elements times their keys. The sum of their words, from the first element on, is added to `words`. */
static uint64_t keyed(const char *elements, int width, const uint64_t *key, int64_t count, uint64_t *words) {
    uint64_t sum = 0, seen = 0;
    if (width == 1)
        for (int64_t i = 0; i < count; i++) sum += ((const uint8_t *)elements)[i] * key[i];
    else if (width == 2)
        for (int64_t i = 0; i < count; i++) sum += ((const uint16_t *)elements)[i] * key[i];
    else if (!words)
        for (int64_t i = 0; i < count; i++) sum += ((const uint32_t *)elements)[i] * key[i];
    else
        for (int64_t i = 0; i < count; i++) {
            const uint64_t element = ((const uint32_t *)elements)[i];
            sum += element * key[i];
            seen += element;
        }
    if (words) *words += width == 4 ? seen : word_sum(elements, count * width);
    return sum;
}

/* `tidemill_keyed_sum` of elements [at, end), in one thread. The sum of their words is added to `words`. */
static uint64_t keyed_runs(const char *bytes, int width, int64_t at, int64_t end, int64_t first, const uint64_t *keys,
                           int64_t run, const uint64_t *factors, uint64_t *words) {
    uint64_t total = 0;
    factors += (first + at) / run - first / run;
    while (at < end) {
        const int64_t begin = (first + at) % run, count = end - at < run - begin ? end - at : run - begin;
        const int64_t whole = begin ? 0 : (end - at) / run, runs = whole < 1 ? 1 : whole < TOGETHER ? whole : TOGETHER;
        uint64_t sums[TOGETHER] = {0};
        for (int64_t i = 0; i < count; i += PART) {
            const int64_t part = count - i < PART ? count - i : PART;
            for (int64_t r = 0; r < runs; r++)
                sums[r] += keyed(bytes + (at + r * run + i) * width, width, keys + begin + i, part, words);
        }
        for (int64_t r = 0; r < runs; r++) total += sums[r] * *factors++;
        at += runs * count;
    }
    return total;
}

/* Sum of elements [first, first + n) of a tensor times their keys, modulo 2^64. The key of element i is keys[i % run] *
 * factors[i / run]; factors start at the run of `first`. Elements are unsigned, of `width` bytes. If `words` is given, it becomes
 * the sum of the elements' words, in the same pass over memory; `run` is a multiple of four. */
uint64_t tidemill_keyed_sum(const void *elements, int width, int64_t n, int64_t first, const uint64_t *keys, int64_t run,
                            const uint64_t *factors, uint64_t *words, int threads) {
    const int64_t runs = n ? (first + n - 1) / run - first / run + 1 : 0;
    const int whole = words && first * width % 4 == 0; /* then every part of a run begins with a word */
    uint64_t total = 0, seen = 0;
    if (threads > runs) threads = runs;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total, seen) if (threads > 1)
    for (int part = 0; part < threads; part++) { /* a run is never divided */
        const int64_t before = runs * part / threads * run - first % run, after = runs * (part + 1) / threads * run - first % run;
        const int64_t from = before < 0 ? 0 : before, to = after < n ? after : n;
        total += keyed_runs(elements, width, from, to, first, keys, run, factors, whole ? &seen : NULL);
    }
    if (words) *words = whole ? seen : tidemill_word_sum(elements, n * width, threads);
    return total;
}
