/* Gradient of bfloat16 weights: d^T x, summed over rows in float32, two rows per step.
 *
 * A stretch of rows is first arranged in pairs (each number beside that of the next row), in the order in which they are read:
 *     d     [outputs / OUTPUTS][pairs of rows][OUTPUTS][2]
 *     x     [inputs / INPUTS][pairs of rows][INPUTS][2]
 */

#include "tiles.h"

#include <stdlib.h>

#ifdef PAIRS
#define OUTPUTS 12
#define INPUTS 32
#define PAIRS_OF_ROWS 256 /* in a stretch: with INPUTS numbers each, they fill the first-level cache */
#define BESIDE 4 /* groups that are paired together: writing to more places at a time is slower */

typedef struct {
    const uint16_t *numbers;
    int64_t stride;
    int count; /* numbers in a row */
} matrix;

/* Arranges `rows` rows from `first` on in pairs, padded with zeros in both directions. */
INLINE void put_in_pairs(matrix of, int first, int rows, int32_t *to, const int size) {
    const int pairs = (rows + 1) / 2, groups = (of.count + size - 1) / size;
    for (int begin = 0; begin < groups; begin += BESIDE)
        for (int p = 0; p < pairs; p++) {
            const uint16_t *row = of.numbers + (first + 2 * p) * of.stride;
            for (int g = begin; g < groups && g < begin + BESIDE; g++)
                for (int i = 0; i < size; i += 16) {
                    const int at = g * size + i, left = of.count - at, room = size - i < 16 ? size - i : 16;
                    const int some = left < 0 ? 0 : left < room ? left : room;
                    const __mmask16 here = (__mmask16)((1u << some) - 1), next = 2 * p + 1 < rows ? here : 0;
                    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, row + at));
                    const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(next, row + of.stride + at));
                    const __m512i both = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
                    _mm512_mask_storeu_epi32(to + ((int64_t)g * pairs + p) * size + i, (__mmask16)((1u << room) - 1), both);
                }
        }
}

/* sums [outputs, INPUTS] += the products of a stretch; rows lie `to` numbers apart. Prefetches the sums at `ahead`. */
INLINE void add_pairs(const int32_t *d, const int32_t *x, int pairs, float *sums, int64_t to, const float *ahead, const int outputs) {
    __m512 held[OUTPUTS][2];
    UNROLL for (int r = 0; r < outputs; r++)
        UNROLL for (int half = 0; half < 2; half++) held[r][half] = _mm512_loadu_ps(sums + r * to + half * 16);
    for (int p = 0; p < pairs; p++, d += OUTPUTS, x += INPUTS) {
        if (p < 2 * outputs) __builtin_prefetch(ahead + p / 2 * to + p % 2 * 16, 1, 3);
        const __m512bh low = (__m512bh)_mm512_loadu_si512(x), high = (__m512bh)_mm512_loadu_si512(x + 16);
        UNROLL for (int r = 0; r < outputs; r++) {
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(d[r]);
            held[r][0] = _mm512_dpbf16_ps(held[r][0], low, factor);
            held[r][1] = _mm512_dpbf16_ps(held[r][1], high, factor);
        }
    }
    UNROLL for (int r = 0; r < outputs; r++)
        UNROLL for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums + r * to + half * 16, held[r][half]);
}

/* sums [d.count, x.count] += d^T x. Returns 0, or 1 if there is no memory. */
static int outer(matrix d, matrix x, int rows, float *sums, int64_t to) {
    const int groups = (d.count + OUTPUTS - 1) / OUTPUTS, blocks = x.count / INPUTS;
    int32_t *of_d = malloc((size_t)groups * OUTPUTS * PAIRS_OF_ROWS * 4);
    int32_t *of_x = aligned_alloc(64, (size_t)blocks * INPUTS * PAIRS_OF_ROWS * 4);
    const int failed = !of_d || !of_x;
    for (int first = 0; !failed && first < rows; first += 2 * PAIRS_OF_ROWS) {
        const int some = rows - first < 2 * PAIRS_OF_ROWS ? rows - first : 2 * PAIRS_OF_ROWS, pairs = (some + 1) / 2;
        put_in_pairs(d, first, some, of_d, OUTPUTS);
        put_in_pairs(x, first, some, of_x, INPUTS);
        for (int b = 0; b < blocks; b++)
            for (int g = 0; g < groups; g++) {
                const int32_t *factors = of_d + (int64_t)g * pairs * OUTPUTS, *block = of_x + (int64_t)b * pairs * INPUTS;
                const int left = d.count - g * OUTPUTS;
                float *here = sums + g * OUTPUTS * to + b * INPUTS;
                const float *ahead = left > OUTPUTS ? here + OUTPUTS * to : sums + (b + 1) * INPUTS; /* past the last: harmless */
                if (left >= OUTPUTS) add_pairs(factors, block, pairs, here, to, ahead, OUTPUTS);
                else for (int r = 0; r < left; r++) add_pairs(factors + r, block, pairs, here + r * to, to, ahead, 1);
            }
    }
    free(of_d);
    free(of_x);
    return failed;
}

INLINE matrix columns(matrix of, int part, int parts, int size) {
    const int units = (of.count + size - 1) / size;
    const int first = (int64_t)units * part / parts * size, last = (int64_t)units * (part + 1) / parts * size;
    return (matrix){of.numbers + first, of.stride, (last < of.count ? last : of.count) - first};
}
#endif

/* sums [outputs, inputs] (dense) += d^T x, with d [rows, outputs] and x [rows, inputs]; inputs is a multiple of 32. Each thread
 * takes a part of the wider dimension. Returns 0; 1 if there is no memory (some products are added then, some are not); 2 if the
 * processor has no such products. */
int tidemill_outer(const uint16_t *d, int64_t d_stride, const uint16_t *x, int64_t x_stride, float *sums, int rows, int outputs,
                   int inputs, int threads) {
#ifdef PAIRS
    const matrix whole_d = {d, d_stride, outputs}, whole_x = {x, x_stride, inputs};
    const int by_outputs = outputs >= inputs;
    int failed = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : failed) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        const matrix of_d = by_outputs ? columns(whole_d, part, threads, OUTPUTS) : whole_d;
        const matrix of_x = by_outputs ? whole_x : columns(whole_x, part, threads, INPUTS);
        float *here = sums + (of_d.numbers - d) * inputs + (of_x.numbers - x);
        if (of_d.count && of_x.count) failed |= outer(of_d, of_x, rows, here, inputs);
    }
    return failed;
#else
    return 2;
#endif
}
