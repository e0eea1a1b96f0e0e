/* x W^T + b for weights [outputs, inputs] that were packed once, in the order in which they are read here.
 *
 * A block holds the weights of BLOCK outputs for all inputs; the last one is padded with zeros.
 *     float      [blocks][inputs][BLOCK]
 *     bfloat16   [blocks][inputs / 32][2 halves][16 pairs of inputs][16 outputs][2 inputs]: two tiles of 1 KiB per step
 *
 * An output is one sum over the inputs in their order, so its bits depend on neither the other rows nor their number.
 */

#include "rows.h"
#include "tiles.h"

#include <stdlib.h>
#ifdef TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define BLOCK 32
#define ROWS (FULL / 2) /* rows that share the loaded weights of a block */
#define PASSES (BLOCK / (2 * WIDTH)) /* passes over a block, of two vectors of outputs each */
#define ASKING(narrow) (PASSES > 1 ? 4 : 1 + (narrow)) /* inputs per prefetch of one or two lines */
#define STEP 32  /* inputs in a tile */
#define HALF 512 /* bfloat16 numbers in a tile */
#define NEAR (1 << 19) /* numbers of x that are read for each block: they fit the second-level cache */
#define MOST_ROWS 256  /* rows at a time, except in tiles */
#define CROWDED 2048   /* the first-level cache holds few rows that lie a multiple of so many bytes apart: they are copied */
#define LINE 64        /* bytes of a cache line */
#define WORTH_ASKING (PASSES > 1 ? ROWS + 1 : ROWS) /* rows from which prefetching floats pays */
#define STRETCH 128    /* inputs per stretch: its weights are read for each set of rows, and fit the first-level cache */

/* Kinds of products: one for float32, three for bfloat16. */
enum { FLOATS, WIDENED, PAIRED, TILED };

/* ---- in vectors ------------------------------------------------------------------------------------------------- */

/* Prefetches one or two lines of what is read next. Present reads would wait if more were requested at once. */
INLINE void ask(const char *ahead, int rate) {
    if (rate) __builtin_prefetch(ahead, 0, 3);
    if (rate > LINE) __builtin_prefetch(ahead + LINE, 0, 3);
}

/* Keeps a vector in a register: compilers tend to reload it from memory at every use. */
INLINE void keep(vec *value) {
#if defined(__AVX512F__) || (defined(__AVX2__) && WIDTH <= 8)
    __asm__("" : "+v"(*value));
#endif
}

/* sums [rows, BLOCK / WIDTH] += factors (one per row) times `across` vectors of weights. */
INLINE void add_products(const float *factors, int64_t stride, vec *weights, vec *sums, const int rows, const int across) {
    if (rows > across) UNROLL for (int v = 0; v < across; v++) keep(&weights[v]);
    UNROLL for (int r = 0; r < rows; r++) {
        const float factor = factors[r * stride];
        UNROLL for (int v = 0; v < across; v++) sums[r * (BLOCK / WIDTH) + v] += weights[v] * factor;
    }
}

/* Loads the weights of input k, and of input k + 1 if they are narrow, for the outputs from `c` on. */
INLINE void weights_at(const void *block, int narrow, int k, int c, vec *these, vec *next, const int across) {
    UNROLL for (int v = 0; v < across; v++) {
        const int at = c + v * WIDTH;
        if (narrow) {
            ints both;
            const int tile = k / STEP * 2 + at / 16;
            memcpy(&both, (const uint16_t *)block + tile * HALF + k % STEP * 16 + at % 16 * 2, sizeof both);
            these[v] = (vec)(both << 16), next[v] = (vec)(both & (int32_t)0xffff0000);
        } else these[v] = load((const float *)block + (int64_t)k * BLOCK + at, 0);
    }
}

/* Adds the products of a stretch of inputs to `kept` [rows, BLOCK], which starts at 0 if `begins`. It prefetches `rate` bytes from
 * `ahead` with every ASKING inputs. For narrow weights, the number of inputs is a multiple of STEP. */
INLINE void float_rows(const float *x, int64_t stride, const void *block, int narrow, int inputs, int begins, float *kept,
                       const char *ahead, int rate, const int rows) {
    const int across = rows * BLOCK / WIDTH <= FULL ? BLOCK / WIDTH : 2; /* few sums wait for one another */
    for (int c = 0; c < BLOCK; c += across * WIDTH) {
        vec sums[ROWS][BLOCK / WIDTH], these[BLOCK / WIDTH], next[BLOCK / WIDTH];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < across; v++)
                sums[r][v] = begins ? (vec){0} : load(kept + r * BLOCK + c + v * WIDTH, 0);
        int k = 0;
        for (; k + ASKING(narrow) <= inputs; k += ASKING(narrow), ahead += rate) {
            ask(ahead, rate);
            UNROLL for (int i = 0; i < ASKING(narrow); i += 1 + narrow) {
                weights_at(block, narrow, k + i, c, these, next, across);
                add_products(x + k + i, stride, these, sums[0], rows, across);
                if (narrow) add_products(x + k + i + 1, stride, next, sums[0], rows, across);
            }
        }
        for (; k < inputs; k++) { /* never for narrow weights */
            weights_at(block, narrow, k, c, these, next, across);
            add_products(x + k, stride, these, sums[0], rows, across);
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < across; v++) memcpy(kept + r * BLOCK + c + v * WIDTH, &sums[r][v], sizeof(vec));
    }
}

INLINE void rows_of_floats(const float *x, int64_t stride, const float *block, int inputs, int begins, float *kept,
                           const char *ahead, int rate, const int rows) {
    float_rows(x, stride, block, 0, inputs, begins, kept, ahead, rate, rows);
}

/* For weights that only one set of rows reads: they are widened as they are read. */
INLINE void rows_widening(const float *x, int64_t stride, const uint16_t *block, int inputs, int begins, float *kept,
                          const char *ahead, int rate, const int rows) {
    float_rows(x, stride, block, 1, inputs, begins, kept, ahead, rate, rows);
}

/* Widens bfloat16 weights to floats [inputs, BLOCK]. */
INLINE void widen_block(const uint16_t *block, int inputs, float *to) {
    for (int k = 0; k < inputs; k += 2, to += 2 * BLOCK) {
        vec these[BLOCK / WIDTH], next[BLOCK / WIDTH];
        weights_at(block, 1, k, 0, these, next, BLOCK / WIDTH);
        memcpy(to, these, sizeof these);
        memcpy(to + BLOCK, next, sizeof next);
    }
}

#ifdef PAIRS
/* As `float_rows`, for bfloat16: two inputs per step. */
INLINE void pair_rows(const uint16_t *x, int64_t stride, const uint16_t *block, int inputs, int begins, float *kept,
                      const char *ahead, int rate, const int rows) {
    __m512 sums[ROWS][2];
    UNROLL for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            sums[r][half] = begins ? _mm512_setzero_ps() : _mm512_loadu_ps(kept + r * BLOCK + half * 16);
    for (int k = 0; k < inputs; k += STEP, block += 2 * HALF)
        for (int pair = 0; pair < STEP / 2; pair++, ahead += rate) {
            ask(ahead, rate);
            const __m512bh low = (__m512bh)_mm512_loadu_si512(block + pair * 32);
            const __m512bh high = (__m512bh)_mm512_loadu_si512(block + HALF + pair * 32);
            UNROLL for (int r = 0; r < rows; r++) {
                int32_t both;
                memcpy(&both, x + r * stride + k + 2 * pair, sizeof both);
                const __m512bh factor = (__m512bh)_mm512_set1_epi32(both);
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], low, factor);
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], high, factor);
            }
        }
    UNROLL for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(kept + r * BLOCK + half * 16, sums[r][half]);
}
#endif

/* A stretch of inputs for all rows. Meanwhile it prefetches the `bytes` from `next`, which are read next, at most 2 * LINE per
 * step. Prefetching past the last weights is harmless. */
#define SOME(ROWS_OF, n)                                                                                                    \
    case n: ROWS_OF(rows, stride, block, inputs, begins, sums, next, rate, n < ROWS ? n : ROWS); break;
#define STRETCHES(NAME, NUMBER, WEIGHT, INPUTS, ROWS_OF)                                                                    \
    static void NAME(const NUMBER *x, int64_t stride, const WEIGHT *block, int inputs, int begins, float *kept, int n,      \
                     const char *next, int64_t bytes) {                                                                     \
        const int steps = (inputs + INPUTS - 1) / INPUTS * PASSES, asking = steps * ((n + ROWS - 1) / ROWS);                \
        const int rate = n < WORTH_ASKING && sizeof(WEIGHT) == 4 ? 0 : (int)((bytes + asking - 1) / asking);                \
        for (int r = 0; r < n; r += ROWS, next += (int64_t)steps * rate) {                                                  \
            const NUMBER *rows = x + r * stride;                                                                            \
            float *sums = kept + (int64_t)r * BLOCK;                                                                        \
            switch (n - r) {                                                                                                \
            SOME(ROWS_OF, 1) SOME(ROWS_OF, 2) SOME(ROWS_OF, 3) SOME(ROWS_OF, 4) SOME(ROWS_OF, 5) SOME(ROWS_OF, 6)           \
            SOME(ROWS_OF, 7) SOME(ROWS_OF, 8) SOME(ROWS_OF, 9) SOME(ROWS_OF, 10) SOME(ROWS_OF, 11)                          \
            default: ROWS_OF(rows, stride, block, inputs, begins, sums, next, rate, ROWS);                                  \
            }                                                                                                               \
        }                                                                                                                   \
    }
STRETCHES(float_stretch, float, float, ASKING(0), rows_of_floats)
STRETCHES(widening_stretch, float, uint16_t, ASKING(1), rows_widening)
#ifdef PAIRS
STRETCHES(pair_stretch, uint16_t, uint16_t, 2, pair_rows)
#endif

/* Adds the bias to a block's sums [rows, BLOCK] and writes them to `out`, whose rows lie `to` numbers apart. */
static void put_sums(float *sums, const void *bias, int narrow, void *out, int narrow_out, int rows, int outputs, int64_t to) {
    float add[BLOCK];
    if (bias) widen(bias, 0, outputs, narrow, add);
    for (int r = 0; r < rows; r++, sums += BLOCK) {
        if (bias) for (int c = 0; c < outputs; c++) sums[c] += add[c];
        if (outputs == BLOCK) put(sums, BLOCK, narrow_out, out, r * to);
        else put(sums, outputs, narrow_out, out, r * to);
    }
}

/* Blocks [first, last) of the product. x [n, inputs] is bfloat16 if PAIRED, else floats. */
INLINE void vector_linear(const int kind, const void *x, int64_t stride, const void *packed, const void *bias, void *out,
                          int narrow_out, int n, int outputs, int inputs, int first, int last) {
    const int narrow = kind != FLOATS, width = narrow ? 2 : 4, x_width = kind == PAIRED ? 2 : 4, step = narrow_out ? 2 : 4;
    const int length = kind == PAIRED ? 2 * STRETCH : STRETCH;
    float kept[MOST_ROWS * BLOCK] __attribute__((aligned(64)));
    float wide[kind == WIDENED ? STRETCH * BLOCK : 1] __attribute__((aligned(64)));
    for (int b = first; b < last; b++) {
        const int begin = b * BLOCK, count = outputs - begin < BLOCK ? outputs - begin : BLOCK;
        const char *block = (const char *)packed + (int64_t)b * inputs * BLOCK * width;
        for (int k = 0; k < inputs; k += length) {
            const int some = inputs - k < length ? inputs - k : length;
            const void *from = (const char *)x + k * x_width;
            const char *weights = block + (int64_t)k * BLOCK * width;
            const int64_t bytes = (int64_t)some * BLOCK * width;
            const char *next = weights + bytes;
            if (kind == FLOATS) float_stretch(from, stride, (const float *)weights, some, k == 0, kept, n, next, bytes);
            if (kind == WIDENED && n <= ROWS)
                widening_stretch(from, stride, (const uint16_t *)weights, some, k == 0, kept, n, next, bytes);
            else if (kind == WIDENED) {
                widen_block((const uint16_t *)weights, some, wide);
                float_stretch(from, stride, wide, some, k == 0, kept, n, next, bytes);
            }
#ifdef PAIRS
            if (kind == PAIRED) pair_stretch(from, stride, (const uint16_t *)weights, some, k == 0, kept, n, next, bytes);
#endif
        }
        put_sums(kept, bias ? (const char *)bias + begin * width : 0, narrow, (char *)out + (int64_t)begin * step, narrow_out, n,
                 count, outputs);
    }
}

/* ---- bfloat16 in tiles ------------------------------------------------------------------------------------------ */

#ifdef TILES
/* Shapes the tiles: 0 to 3 hold sums (two of rows by two of outputs), 4 and 5 rows of x, 6 and 7 weights. */
INLINE void tiles_for(int rows) {
    shape tiles = {.palette = 1};
    const int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 1;
    for (int t = 0; t < 8; t++) {
        tiles.bytes[t] = 64;
        tiles.rows[t] = t >= 6 ? 16 : (t == 0 || t == 1 || t == 4) ? upper : lower;
    }
    _tile_loadconfig(&tiles);
}

/* Sums of up to 32 rows for one block, in tiles 0 to 3. It prefetches `lines` cache lines per step from `ahead`. */
INLINE void tile_sums(const uint16_t *x, int64_t stride, const uint16_t *block, int inputs, const char *ahead, int lines,
                      const int both) {
    const int64_t bytes = stride * 2;
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < inputs; k += STEP, block += 2 * HALF) {
        for (int i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        _tile_loadd(6, block, 64);
        _tile_loadd(7, block + HALF, 64);
        _tile_loadd(4, x + k, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, x + 16 * stride + k, bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

/* Writes the sums in tiles 0 to 3 to `out`, with the bias, as floats or rounded. */
INLINE void tile_store(const uint16_t *bias, void *out, int narrow_out, int rows, int outputs, int64_t to) {
    float sums[32][BLOCK] __attribute__((aligned(64)));
    _tile_stored(0, sums[0], sizeof sums[0]);
    _tile_stored(1, sums[0] + 16, sizeof sums[0]);
    if (rows > 16) {
        _tile_stored(2, sums[16], sizeof sums[0]);
        _tile_stored(3, sums[16] + 16, sizeof sums[0]);
    }
    put_sums(sums[0], bias, 1, out, narrow_out, rows, outputs, to);
}

static void tile_linear(const uint16_t *x, int64_t stride, const uint16_t *packed, const uint16_t *bias, void *out,
                        int narrow_out, int n, int outputs, int inputs, int first, int last) {
    const int64_t size = narrow_out ? 2 : 4;
    const int sets = (n + 31) / 32, share = sets > 2 ? (32 + sets - 1) / sets : 0; /* prefetching does not pay with few rows */
    int shaped = 0;
    for (int b = first; b < last; b++) {
        const int begin = b * BLOCK, count = outputs - begin < BLOCK ? outputs - begin : BLOCK;
        const uint16_t *block = packed + (int64_t)b * inputs * BLOCK;
        const char *ahead = (const char *)(block + (int64_t)inputs * BLOCK); /* each set of rows prefetches its share */
        for (int r = 0; r < n; r += 32, ahead += (int64_t)inputs / STEP * share * 64) {
            const int rows = n - r < 32 ? n - r : 32, lines = b + 1 < last ? share : 0;
            if (rows != shaped) tiles_for(shaped = rows);
            if (rows > 16) tile_sums(x + r * stride, stride, block, inputs, ahead, lines, 1);
            else tile_sums(x + r * stride, stride, block, inputs, ahead, lines, 0);
            char *to = (char *)out + ((int64_t)r * outputs + begin) * size;
            tile_store(bias ? bias + begin : 0, to, narrow_out, rows, count, outputs);
        }
    }
    _tile_release();
}
#endif

/* ---- all of them ------------------------------------------------------------------------------------------------ */

int tidemill_tiles(void) {
    static int allowed = -1;
#ifdef TILES
    if (allowed < 0) allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#endif
    return allowed > 0;
}

/* True if there is code for this kind, and the processor runs it. */
int tidemill_multiplies(int kind) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    if (kind == FLOATS || kind == WIDENED) return 1;
#endif
#ifdef PAIRS
    if (kind == PAIRED) return 1;
#endif
    return kind == TILED && tidemill_tiles();
}

/* True if PAIRED is faster than WIDENED. Intel's processors add up pairs at half the speed of floats; those whose tiles may be
 * used take TILED anyway. */
int tidemill_pairs_are_quick(void) {
#ifdef PAIRS
    __builtin_cpu_init();
    return !__builtin_cpu_is("intel");
#endif
    return 0;
}

/* Packs weights. Both layouts consist of transposed squares of 16 outputs by 16 units of four bytes: one float or two bfloat16
 * numbers. bytes: distance from one output's weights to the next one's. */
INLINE void pack(int32_t *packed, const char *weight, int64_t bytes, int outputs, int units, int narrow) {
    const int64_t half = narrow ? HALF / 2 : 16, next = narrow ? 16 : BLOCK;
    for (int64_t c = 0; c < (outputs + BLOCK - 1) / BLOCK * BLOCK; c += WIDTH)
        for (int k = 0; k < units; k += WIDTH) {
            const int count = units - k < WIDTH ? units - k : WIDTH;
            int32_t *square_of = packed + (c / BLOCK * units + k / 16 * 16) * BLOCK + c % BLOCK / 16 * half;
            int32_t *to = square_of + k % 16 * next + c % 16;
            ints square[WIDTH];
            UNROLL for (int r = 0; r < WIDTH; r++) {
                square[r] = (ints){0};
                if (c + r < outputs) {
                    const char *from = weight + (c + r) * bytes + (int64_t)k * 4;
                    if (count == WIDTH) memcpy(&square[r], from, sizeof(ints));
                    else memcpy(&square[r], from, count * 4);
                }
            }
            turn(square);
            for (int i = 0; i < count; i++) memcpy(to + i * next, &square[i], sizeof square[i]);
        }
}

void tidemill_pack(void *packed, const void *weight, int64_t stride, int outputs, int inputs, int narrow, int threads) {
    const int blocks = (outputs + BLOCK - 1) / BLOCK, units = narrow ? inputs / 2 : inputs;
    const int64_t bytes = stride * (narrow ? 2 : 4);
    if (threads > blocks) threads = blocks;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        const int first = (int64_t)blocks * part / threads * BLOCK, end = (int64_t)blocks * (part + 1) / threads * BLOCK;
        int32_t *to = (int32_t *)packed + (int64_t)first * units;
        const char *from = (const char *)weight + first * bytes;
        const int rows = (end < outputs ? end : outputs) - first;
        if (narrow) pack(to, from, bytes, rows, units, 1);
        else pack(to, from, bytes, rows, units, 0);
    }
}

/* Returns 0, or 1 if there is no memory. */
int tidemill_linear(const void *x, int64_t stride, const void *packed, const void *bias, void *out, int kind, int narrow_out,
                    int n, int outputs, int inputs, int threads) {
    const int narrow = kind != FLOATS, blocks = (outputs + BLOCK - 1) / BLOCK, size = narrow ? 2 : 4, to = narrow_out ? 2 : 4;
    const int near = kind == WIDENED ? 4 : size, fit = NEAR / inputs / 32 * 32, some = fit < 32 ? 32 : fit;
    const int most = kind == TILED || some < MOST_ROWS ? some : MOST_ROWS;
    const int64_t apart = (int64_t)inputs * near + LINE;
    const int widens = kind == WIDENED, crowded = kind != TILED && n > 1 && stride * size % CROWDED == 0;
    int failed = 0;
    if (!n) return 0;
    if (threads > blocks) threads = blocks;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : failed) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        const int first = (int64_t)blocks * part / threads, last = (int64_t)blocks * (part + 1) / threads;
        char *copy = widens || (crowded && last - first > 1) ? malloc((n < most ? n : most) * apart) : 0;
        if (widens && !copy) { /* without a copy of other kinds it is only slower */
            failed = 1;
            continue;
        }
        for (int r = 0; r < n; r += most) {
            const int rows = n - r < most ? n - r : most;
            const char *from = (const char *)x + r * stride * size;
            char *into = (char *)out + (int64_t)r * outputs * to;
            for (int i = 0; copy && i < rows; i++)
                if (widens) widen(from, i * stride, inputs, 1, (float *)(copy + i * apart));
                else memcpy(copy + i * apart, from + i * stride * size, (size_t)inputs * size);
            const void *close = copy ? copy : from;
            const int64_t step = copy ? apart / near : stride;
#define OF close, step, packed, bias, into, narrow_out, rows, outputs, inputs, first, last
            switch (kind) {
            case FLOATS: vector_linear(FLOATS, OF); break;
            case WIDENED: vector_linear(WIDENED, OF); break;
#ifdef PAIRS
            case PAIRED: vector_linear(PAIRED, OF); break;
#endif
#ifdef TILES
            case TILED: tile_linear(OF); break;
#endif
            }
        }
        free(copy);
    }
    return failed;
}
