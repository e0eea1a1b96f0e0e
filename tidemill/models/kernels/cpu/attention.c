/* Attention of decoding rows over pages, and the writing of pages.
 *
 * A layer's pages: [pages, kv_heads, page_size, 2 * size], a token's key and value side by side. Most of the time goes into
 * reading them, so rows that begin with the same pages are processed together: these pages are read once, for all of their
 * queries, then each row's own. Memory is prefetched: a run of one page and one head is too short for the processor to predict.
 *
 * A query's softmax is computed piece by piece: the sums are rescaled when a greater score comes.
 */

#include "rows.h"
#include "tiles.h"

#include <math.h>

#define MOST_QUERIES 16 /* query heads per key/value head */
#define MOST_VECTORS (128 / WIDTH) /* vectors in a head */
#define TOGETHER 32     /* queries of rows that are processed together */
#define MOST_ROWS 8     /* rows per family without shared pages: one's pages are prefetched while another's are read */
#define AT_A_TIME (256 / WIDTH) /* vectors of the queries that are scored together */
#define HELD (REGISTERS / 2)    /* vectors of keys or values in registers; a quarter of it is even */
#define WORTH_TILES 5   /* queries from which tiles are faster */
#define FORE 4          /* rows that a write is prefetched ahead */
#define AT_ONCE 64      /* tokens per piece: their scores are read twice, and fit the first-level cache */
#define AHEAD AT_ONCE   /* tokens that a read is prefetched ahead */

/* Layout of a layer's pages. */
typedef struct {
    int64_t page_bytes, stride; /* bytes between pages, and between a head's tokens */
    int page_size, shift; /* tokens per page; 2^shift if shift is not 0 */
} layout;

/* Tokens [low, end) of a sequence. `table` lists its pages; `pages` is where those of a key/value head begin. */
typedef struct {
    const int32_t *table;
    const char *pages;
    int low, end;
} span;

/* Running softmax of some queries: greatest score, sum of weights, weighted sum of values (V vectors per query). */
typedef struct {
    float greatest[TOGETHER], total[TOGETHER];
    vec sums[TOGETHER * MOST_VECTORS];
} state;

INLINE int between(int least, int x, int most) { return x < least ? least : x > most ? most : x; }
INLINE int aligned(int token) { return token / WIDTH * WIDTH; }

INLINE const char *place(const layout *kv, span seen, int token) {
    const int page = kv->shift ? token >> kv->shift : token / kv->page_size; /* divisions are slow */
    return seen.pages + seen.table[page] * kv->page_bytes + (token - page * kv->page_size) * kv->stride;
}

/* Address of what is read AHEAD tokens after `token`: the run of WIDTH tokens there, from its token `from` on. Past the end of
 * `seen` it lies in the spans of `next`, the last of which is empty; past those it is NULL. */
INLINE const char *ahead_of(const layout *kv, span seen, const span *next, int token, int from) {
    for (token += AHEAD; token >= seen.end; seen = *next++) {
        if (!next->end) return 0;
        token += aligned(next->low) - aligned(seen.end + WIDTH - 1);
    }
    return place(kv, seen, token) + from * kv->stride;
}

/* Prefetches `bytes` from `from`, which it advances. Call it with a few cache lines at a time: a processor tracks about two dozen
 * outstanding lines, and stalls other reads when these are taken. The lines go to the second-level cache, because the first
 * has no room for data that is needed this much later. */
INLINE void ask(const char **from, int64_t bytes) {
    if (!*from) return;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(*from + i, 0, 2);
    *from += bytes;
}

/* One step of summing the lanes of several vectors at once: adds the halves of two vectors and leaves one. */
#define JOIN(n, a, b) (EVEN(n, a, b) + ODD(n, a, b))

/* Joins vectors that each hold the sums of four tokens, in lanes four apart, to one vector. */
INLINE vec joined(const vec *fours) {
#if WIDTH == 16
    return JOIN(8, JOIN(4, fours[0], fours[1]), JOIN(4, fours[2], fours[3]));
#elif WIDTH == 8
    return JOIN(4, fours[0], fours[1]);
#else
    return fours[0];
#endif
}

/* Vector v of a token's key or value. If V is even, narrow numbers are split into those at even and at odd places, which is
 * faster than keeping their order; `in_order` restores it. */
INLINE vec part_of(const char *numbers, int v, int V, int narrow) {
    if (!narrow || V % 2) return load(numbers + v * WIDTH * (narrow ? 2 : 4), narrow);
    ints bits;
    memcpy(&bits, numbers + v / 2 * sizeof bits, sizeof bits);
    return (vec)(v % 2 ? bits & (int32_t)0xffff0000 : bits << 16);
}

INLINE void in_order(vec *sums, int V, int narrow) {
    if (narrow && V % 2 == 0)
        UNROLL for (int v = 0; v < V; v += 2) {
            const vec even = sums[v], odd = sums[v + 1];
            sums[v] = FIRST(even, odd);
            sums[v + 1] = LAST(even, odd);
        }
}

/* Products of G queries with the keys of four tokens, in the form that `joined` takes. A query is V vectors of floats, or V / 2 of
 * bfloat16 where the processor multiplies these; `as_query` makes both. Two tokens are processed at a time, so that they, the
 * sums and, if there are many registers, all queries stay in registers. */
INLINE void four_scores(const char *key, int64_t stride, const vec *q, int V, int G, int narrow, int which,
                        vec (*fours)[WIDTH / 4]) {
    vec pairs[2][4], sums[4][2];
    UNROLL for (int pair = 0; pair < 2; pair++, key += 2 * stride) {
#ifdef PAIRS
        if (narrow && V % 2 == 0) {
            UNROLL for (int v = 0; v < V / 2; v++)
                UNROLL for (int i = 0; i < 2; i++) {
                    const __m512bh part = (__m512bh)_mm512_loadu_si512(key + i * stride + v * sizeof(vec));
                    UNROLL for (int g = 0; g < G; g++)
                        sums[g][i] = (vec)_mm512_dpbf16_ps(v ? (__m512)sums[g][i] : _mm512_setzero_ps(),
                                                           (__m512bh)q[g * V + v], part);
                }
        } else
#endif
            UNROLL for (int v = 0; v < V; v++)
                UNROLL for (int i = 0; i < 2; i++) {
                    const vec part = part_of(key + i * stride, v, V, narrow);
                    UNROLL for (int g = 0; g < G; g++) sums[g][i] = v ? sums[g][i] + q[g * V + v] * part : q[g * V + v] * part;
                }
        UNROLL for (int g = 0; g < G; g++) pairs[pair][g] = JOIN(1, sums[g][0], sums[g][1]);
    }
    UNROLL for (int g = 0; g < G; g++) fours[g][which] = JOIN(2, pairs[0][g], pairs[1][g]);
}

/* Sets scores of lanes outside [low, end) to minus infinity. */
INLINE vec only(vec scores, int low, int end) {
    const ints seen = (LANES >= low) & (LANES < end);
    return (vec)(((ints)scores & seen) | (0xff800000 & ~seen));
}

INLINE void as_query(const char *from, int V, int narrow, vec *q) {
#ifdef PAIRS
    if (narrow && V % 2 == 0) {
        memcpy(q, from, V * sizeof(vec) / 2);
        return;
    }
#endif
    UNROLL for (int v = 0; v < V; v++) q[v] = part_of(from, v, V, narrow);
}

/* Attention of queries [from, from + G), of V vectors each, to the first piece of `seen`: AT_ONCE tokens, counted from the
 * beginning of its first run of WIDTH. */
INLINE void attend(int V, int G, int narrow, int asks, const layout *kv, span seen, const span *next, const char *queries,
                   int from, float scale, state *known) {
    const int width = narrow ? 2 : 4, first = aligned(seen.low), skip = seen.low - first;
    const int count = seen.end - first < AT_ONCE ? seen.end - first : AT_ONCE;
    const int whole = aligned(count + WIDTH - 1);
    float scores[4][AT_ONCE] __attribute__((aligned(64)));
    const int most = HELD / G < V ? HELD / G : V; /* vectors of a value per pass */
    vec q[AT_A_TIME];
    UNROLL for (int g = 0; g < G; g++) as_query(queries + (from + g) * V * WIDTH * width, V, narrow, q + g * V);
    for (int at = 0; at < count; at += WIDTH) { /* a run never crosses a page, whose size is a multiple of WIDTH */
        const char *key = place(kv, seen, first + at);
        const char *ahead = asks ? ahead_of(kv, seen, next, first + at, 0) : 0;
        vec fours[4][WIDTH / 4];
        UNROLL for (int i = 0; i < WIDTH / 4; i++) {
            ask(&ahead, kv->stride);
            four_scores(key + 4 * i * kv->stride, kv->stride, q, V, G, narrow, i, fours);
        }
        UNROLL for (int g = 0; g < G; g++) {
            vec all = joined(fours[g]) * scale;
            if (at < skip || at + WIDTH > count) all = only(all, skip - at, count - at);
            memcpy(&scores[g][at], &all, sizeof all);
        }
    }
    for (int g = 0; g < G; g++) {
        float high = known->greatest[from + g], sum = 0;
        _Pragma("omp simd reduction(max : high)") for (int t = 0; t < whole; t++)
            high = scores[g][t] > high ? scores[g][t] : high;
        _Pragma("omp simd reduction(+ : sum)") for (int t = 0; t < whole; t++) {
            scores[g][t] = exponential(scores[g][t] - high);
            sum += scores[g][t];
        }
        const float before = exponential(known->greatest[from + g] - high);
        known->total[from + g] = known->total[from + g] * before + sum;
        known->greatest[from + g] = high;
        for (int v = 0; v < V; v++) known->sums[(from + g) * V + v] *= before;
    }
    for (int part = 0; part < V; part += most, asks = 0) {
        vec sums[HELD];
        UNROLL for (int i = 0; i < G * most; i++) sums[i] = (vec){0};
        for (int at = skip; at < count;) {
            const int left = WIDTH - at % WIDTH, stop = at + left < count ? at + left : count;
            const char *value = place(kv, seen, first + at) + kv->stride / 2 + part * WIDTH * width;
            const char *ahead = asks ? ahead_of(kv, seen, next, aligned(first + at), WIDTH / 4) : 0;
            for (; at < stop; at++, value += kv->stride) {
                ask(&ahead, kv->stride * 3 / 4); /* most of the prefetching is here, where a token takes longer */
                UNROLL for (int v = 0; v < most; v++) {
                    const vec number = part_of(value, v, V, narrow);
                    UNROLL for (int g = 0; g < G; g++) sums[g * most + v] += scores[g][at] * number;
                }
            }
        }
        UNROLL for (int g = 0; g < G; g++) {
            vec *all = known->sums + (from + g) * V + part;
            in_order(sums + g * most, most, narrow && V % 2 == 0);
            UNROLL for (int v = 0; v < most; v++) all[v] += sums[g * most + v];
        }
    }
}

typedef void attention(int, const layout *, span, const span *, const char *, int, float, state *);

/* Queries [from, from + G), as many at a time as have room for their sums in registers. Only the first of them prefetch. */
#define ATTENTION(NAME, V, NARROW)                                                                                          \
    static void NAME(int G, const layout *kv, span seen, const span *next, const char *queries, int from, float scale,       \
                     state *known) {                                                                                        \
        int asks = 1;                                                                                                       \
        for (; 4 * V <= AT_A_TIME && G >= 4; G -= 4, from += 4, asks = 0)                                                   \
            attend(V, 4, NARROW, asks, kv, seen, next, queries, from, scale, known);                                        \
        for (; G >= 2; G -= 2, from += 2, asks = 0)                                                                         \
            attend(V, 2, NARROW, asks, kv, seen, next, queries, from, scale, known);                                        \
        if (G) attend(V, 1, NARROW, asks, kv, seen, next, queries, from, scale, known);                                     \
    }
ATTENTION(wide_16, 16 / WIDTH, 0)
ATTENTION(wide_32, 32 / WIDTH, 0)
ATTENTION(wide_64, 64 / WIDTH, 0)
ATTENTION(wide_128, 128 / WIDTH, 0)
ATTENTION(narrow_16, 16 / WIDTH, 1)
ATTENTION(narrow_32, 32 / WIDTH, 1)
ATTENTION(narrow_64, 64 / WIDTH, 1)
ATTENTION(narrow_128, 128 / WIDTH, 1)

static attention *attention_for(int size, int narrow) {
    switch (size) {
    case 16: return narrow ? narrow_16 : wide_16;
    case 32: return narrow ? narrow_32 : wide_32;
    case 64: return narrow ? narrow_64 : wide_64;
    case 128: return narrow ? narrow_128 : wide_128;
    default: return 0;
    }
}

/* Attention of queries [from, from + G) to all of `seen`, piece by piece. `next`: the spans that are read afterwards. */
static void attend_all(attention *run, int G, const layout *kv, span seen, const span *next, const char *queries, int from,
                       float scale, state *known) {
    for (; seen.low < seen.end; seen.low = aligned(seen.low) + AT_ONCE) run(G, kv, seen, next, queries, from, scale, known);
}

/* ---- many queries, in tiles ------------------------------------------------------------------------------------- */

#ifdef TILES
/* Scores [tokens, 16] of sixteen queries for up to 64 tokens, computed in tiles 0 to 3. The queries are transposed. */
INLINE void tile_scores(int V, const layout *kv, span seen, int count, const ints *queries, float *scores) {
    const char *keys[AT_ONCE / WIDTH];
    for (int i = 0; i * WIDTH < count; i++) keys[i] = place(kv, seen, seen.low + i * WIDTH);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    UNROLL for (int k = 0; k < V / 2; k++) {
        _tile_loadd(4, queries + k * 16, 64);
#define KEYS(t) if (t * WIDTH < count) { _tile_loadd(5, keys[t] + k * 64, kv->stride); _tile_dpbf16ps(t, 5, 4); }
        KEYS(0) KEYS(1) KEYS(2) KEYS(3)
    }
    _tile_stored(0, scores, 64); _tile_stored(1, scores + 256, 64);
    _tile_stored(2, scores + 512, 64); _tile_stored(3, scores + 768, 64);
}

/* Interleaves the values of two tokens, number by number. */
INLINE void value_pair(const char *first, const char *second, int V, ints *to, int apart) {
    short low[32], high[32];
    for (int i = 0; i < 16; i++) low[2 * i] = i, low[2 * i + 1] = 32 + i, high[2 * i] = 16 + i, high[2 * i + 1] = 48 + i;
    UNROLL for (int v = 0; v < V; v += 2) {
        const __m512i a = _mm512_loadu_si512(first + v * 32), b = _mm512_loadu_si512(second + v * 32);
        to[v * apart] = (ints)_mm512_permutex2var_epi16(a, _mm512_loadu_si512(low), b);
        to[(v + 1) * apart] = (ints)_mm512_permutex2var_epi16(a, _mm512_loadu_si512(high), b);
    }
}

/* As `attend`, for sixteen queries from `from` on and a piece of whole runs of WIDTH tokens. Each lane is a query until the
 * weights are transposed. A weight is the sum of two narrow numbers, which is nearly as exact as a float. */
INLINE void tile_attend(int V, const layout *kv, span seen, const span *next, const ints *queries, int from, float scale,
                        state *known) {
    const int count = seen.end - seen.low < AT_ONCE ? seen.end - seen.low : AT_ONCE;
    float scores[AT_ONCE][16] __attribute__((aligned(64))), sums[16][V * WIDTH] __attribute__((aligned(64)));
    float high[16], before[16], total[16] = {0};
    ints upper[2][16], lower[2][16], values[2][MOST_VECTORS][16];
    tile_scores(V, kv, seen, count, queries, scores[0]);
    memcpy(high, known->greatest + from, sizeof high);
    for (int t = 0; t < count; t++)
        _Pragma("omp simd") for (int i = 0; i < 16; i++) {
            scores[t][i] *= scale;
            high[i] = scores[t][i] > high[i] ? scores[t][i] : high[i];
        }
    _Pragma("omp simd") for (int i = 0; i < 16; i++) before[i] = exponential(known->greatest[from + i] - high[i]);
    for (int t = 0; t < count; t++)
        _Pragma("omp simd") for (int i = 0; i < 16; i++) {
            scores[t][i] = exponential(scores[t][i] - high[i]);
            total[i] += scores[t][i];
        }
    for (int i = 0; i < 16; i++) {
        known->total[from + i] = known->total[from + i] * before[i] + total[i];
        known->greatest[from + i] = high[i];
    }
    const int steps = (count + 31) / 32;
    for (int s = 0; s < steps; s++) {
        for (int p = 0; p < 16; p++) {
            const int t = s * 32 + 2 * p;
            upper[s][p] = lower[s][p] = (ints){0};
            for (int v = 0; v < V; v++) values[s][v][p] = (ints){0};
            if (t >= count) continue;
            for (int half = 0; !from && p % 8 == 0 && half < 2; half++) {
                const char *ahead = ahead_of(kv, seen, next, seen.low + t, half * WIDTH / 2);
                ask(&ahead, kv->stride * WIDTH / 2);
            }
            vec a, b;
            memcpy(&a, scores[t], sizeof a), memcpy(&b, scores[t + 1], sizeof b);
            const ints near_a = nearest(a) & (int32_t)0xffff0000, near_b = nearest(b) & (int32_t)0xffff0000;
            upper[s][p] = (near_a >> 16 & 0xffff) | near_b;
            lower[s][p] = (nearest(a - (vec)near_a) >> 16 & 0xffff) | (nearest(b - (vec)near_b) & (int32_t)0xffff0000);
            const char *value = place(kv, seen, seen.low + t) + kv->stride / 2;
            value_pair(value, value + kv->stride, V, &values[s][0][p], 16);
        }
        turn(upper[s]);
        turn(lower[s]);
    }
    for (int v = 0; v < V; v += 4) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (int s = 0; s < steps; s++) {
            _tile_loadd(4, upper[s], 64); _tile_loadd(5, lower[s], 64);
#define VALUES(t) if (v + t < V) { _tile_loadd(6, values[s][v + t], 64); _tile_dpbf16ps(t, 4, 6); _tile_dpbf16ps(t, 5, 6); }
            VALUES(0) VALUES(1) VALUES(2) VALUES(3)
        }
#define SUMS(t) if (v + t < V) { _tile_stored(t, sums[0] + (v + t) * WIDTH, V * WIDTH * sizeof(float)); }
        SUMS(0) SUMS(1) SUMS(2) SUMS(3)
    }
    for (int i = 0; i < 16; i++)
        UNROLL for (int v = 0; v < V; v++) {
            vec sum;
            memcpy(&sum, sums[i] + v * WIDTH, sizeof sum);
            known->sums[(from + i) * V + v] = known->sums[(from + i) * V + v] * before[i] + sum;
        }
}

/* As `attend_all`, for all `asked` queries, rounded up to a multiple of sixteen, and whole runs of WIDTH tokens. */
INLINE void tile_all(int V, const layout *kv, span seen, const span *next, const char *queries, int asked, float scale,
                     state *known) {
    shape tiles = {.palette = 1};
    for (int t = 0; t < 7; t++) tiles.bytes[t] = 64, tiles.rows[t] = 16;
    _tile_loadconfig(&tiles);
    ints turned[TOGETHER / 16][MOST_VECTORS / 2][16];
    for (int from = 0; from < asked; from += 16)
        UNROLL for (int k = 0; k < V / 2; k++) {
            for (int i = 0; i < 16; i++) memcpy(&turned[from / 16][k][i], queries + (from + i) * V * 32 + k * 64, 64);
            turn(turned[from / 16][k]);
        }
    for (; seen.low < seen.end; seen.low += AT_ONCE)
        for (int from = 0; from < asked; from += 16)
            tile_attend(V, kv, seen, next, turned[from / 16][0], from, scale, known);
    _tile_release();
}

static int attend_in_tiles(int size, const layout *kv, span seen, const span *next, const char *queries, int asked, float scale,
                           state *known) {
    switch (size) {
    case 32: tile_all(2, kv, seen, next, queries, asked, scale, known); return 1;
    case 64: tile_all(4, kv, seen, next, queries, asked, scale, known); return 1;
    case 128: tile_all(8, kv, seen, next, queries, asked, scale, known); return 1;
    default: return 0;
    }
}
#else
static int attend_in_tiles(int size, const layout *kv, span seen, const span *next, const char *queries, int asked, float scale,
                           state *known) {
    return 0;
}
#endif

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* Rows order[first] to order[last - 1], processed together: they have the tokens before `shared` in the same pages. */
typedef struct {
    int first, last, shared;
} family;

/* End of the tokens, from `low` on, that two sequences have in the same pages. */
static int common(const int32_t *a, const int32_t *b, int low, int end, int page_size) {
    int page = low / page_size;
    while ((page + 1) * page_size <= end && a[page] == b[page]) page++;
    return page * page_size > low ? page * page_size : low;
}

/* Divides the rows into families of neighbours that share equally many tokens with the row before. A row that shares more with
 * the next one begins a new family with it. Rows that share nothing form families of at most `few`. */
static int families(const int32_t *table, int64_t table_stride, const int64_t *slots, const int64_t *lows, const int64_t *ends,
                    const int64_t *order, int n, int page_size, int most, int few, family *found) {
    int with_last[n + 1], count = 0; /* end of what is shared with the row before; 0: nothing */
    with_last[0] = with_last[n] = 0;
    for (int i = 1; i < n; i++) {
        const int64_t a = order[i - 1], b = order[i], low = lows[a], end = ends[a] < ends[b] ? ends[a] : ends[b];
        const int32_t *pages = table + slots[a] * table_stride, *others = table + slots[b] * table_stride;
        const int same = low == lows[b] ? common(pages, others, (int)low, (int)end, page_size) : 0;
        with_last[i] = same > low ? same : 0;
    }
    for (int first = 0; first < n;) {
        const int shared = first + 1 < n ? with_last[first + 1] : 0, limit = shared ? most : few;
        int last = first + 1;
        while (last < n && last - first < limit && with_last[last] == shared) last++;
        if (last < n && with_last[last] > shared && last - first > 1) last--;
        found[count++] = (family){first, last, last - first > 1 ? shared : 0};
        first = last;
    }
    return count;
}

/* As `attend_all`, for all queries of a family and the first of `spans`. tile_size: a head's size if there are tiles, else 0.
 * Tiles take whole runs of tokens. */
static void attend_shared(attention *run, int tile_size, int asked, const layout *kv, span *spans, const char *queries,
                          float scale, state *known) {
    if (asked >= WORTH_TILES && tile_size) {
        span begin = spans[0];
        begin.end = spans[0].low = aligned(begin.low + WIDTH - 1);
        attend_all(run, asked, kv, begin, spans, queries, 0, scale, known);
        if (attend_in_tiles(tile_size, kv, spans[0], spans + 1, queries, asked, scale, known)) return;
    }
    attend_all(run, asked, kv, spans[0], spans + 1, queries, 0, scale, known);
}

/* The pages of one key/value head of the layer. */
INLINE const char *pages_of(const paged_queries *of, int head) {
    return (const char *)of->kv + (int64_t)head * of->page_size * 2 * of->size * (of->narrow ? 2 : 4);
}

/* The span that is read first for a family. */
static span first_of(const paged_queries *of, const family *rows, int head) {
    const int64_t r = of->order[rows->first];
    return (span){of->table + of->slots[r] * of->table_stride, pages_of(of, head), of->lows[r],
                  rows->shared ? rows->shared : of->ends[r]};
}

/* Attention of a family's queries that share one key/value head. after: the span that this thread reads next. */
static void attend_family(const paged_queries *of, attention *run, const family *rows, int head, span after) {
    const int size = of->size, narrow = of->narrow, G = of->q_heads / of->kv_heads, width = narrow ? 2 : 4;
    const int members = rows->last - rows->first, each = G * size * width, stride = 2 * size * width;
    const int64_t *row = of->order + rows->first;
    const char *pages = pages_of(of, head);
    const layout kv = {(int64_t)of->kv_heads * of->page_size * stride, stride, of->page_size,
                       of->page_size & (of->page_size - 1) ? 0 : __builtin_ctz(of->page_size)};
    char queries[TOGETHER * MOST_VECTORS * WIDTH * 4] __attribute__((aligned(64)));
    span spans[TOGETHER + 3], *own = spans + 1; /* the shared span, each row's own, the next family's, and the end */
    state known;
    for (int i = 0; i < members; i++) {
        const int64_t r = row[i], from = r * of->q_stride + (int64_t)head * G * size, low = of->lows[r];
        memcpy(queries + i * each, (const char *)of->q + from * width, each);
        own[i] = (span){of->table + of->slots[r] * of->table_stride, pages, low > rows->shared ? low : rows->shared, of->ends[r]};
    }
    own[members] = after;
    own[members + 1] = (span){0};
    const int rounded = aligned(members * G + WIDTH - 1); /* rounded up, for tiles */
    memset(queries + members * each, 0, (size_t)(rounded - members * G) * size * width);
    for (int i = 0; i < rounded; i++) known.greatest[i] = -INFINITY, known.total[i] = 0;
    memset(known.sums, 0, (size_t)rounded * size * sizeof(float));
    spans[0] = (span){own[0].table, pages, (int)of->lows[row[0]], rows->shared};
    const int tiles = narrow && tidemill_tiles();
    if (rows->shared) attend_shared(run, tiles ? size : 0, members * G, &kv, spans, queries, of->scale, &known);
    for (int i = 0; i < members; i++) attend_all(run, G, &kv, own[i], own + i + 1, queries, i * G, of->scale, &known);
    for (int i = 0; i < members; i++) {
        float *sums = (float *)known.sums + i * G * size;
        for (int g = 0; g < G; g++)
            for (int e = 0; e < size; e++) sums[g * size + e] /= known.total[i * G + g];
        put(sums, G * size, narrow, of->out, (row[i] * of->q_heads + head * G) * size);
    }
}

/* Attention of all rows; see `paged_queries`. Returns 0, or 1 if there is no code for these sizes. */
int tidemill_attend(const paged_queries *of, int threads) {
    const int n = of->n, G = of->q_heads / of->kv_heads;
    attention *run = attention_for(of->size, of->narrow);
    if (!run || G > MOST_QUERIES || of->page_size % WIDTH) return 1;
    const int share = n * of->kv_heads / threads;
    const int most = between(1, share / 2, TOGETHER / G), few = between(1, share / 8, most < MOST_ROWS ? most : MOST_ROWS);
    family found[n + 1];
    const int count =
        families(of->table, of->table_stride, of->slots, of->lows, of->ends, of->order, n, of->page_size, most, few, found);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int item = 0; item < count * of->kv_heads; item++) {
        const int then = item + 1, follows = threads == 1 && then < count * of->kv_heads;
        const span after = follows ? first_of(of, &found[then / of->kv_heads], then % of->kv_heads) : (span){0};
        attend_family(of, run, &found[item / of->kv_heads], item % of->kv_heads, after);
    }
    return 0;
}

/* Writes keys and values [n, kv_heads, size], of `width` bytes a number, to the places `writes` (page * page_size + offset). Each
 * place is prefetched FORE rows ahead. */
void tidemill_write(void *kv, int width, const void *k, int64_t k_stride, const void *v, int64_t v_stride,
                    const int64_t *writes, int n, int kv_heads, int size, int page_size) {
    const int64_t bytes = (int64_t)size * width, head_bytes = page_size * 2 * bytes;
    for (int row = -FORE; row < n; row++) {
        if (row + FORE < n) {
            const int64_t page = writes[row + FORE] / page_size, offset = writes[row + FORE] % page_size;
            const char *to = (char *)kv + page * kv_heads * head_bytes + offset * 2 * bytes;
            for (int head = 0; head < kv_heads; head++)
                for (int64_t i = 0; i < 2 * bytes; i += 64) __builtin_prefetch(to + head * head_bytes + i, 1);
        }
        if (row < 0) continue;
        const int64_t page = writes[row] / page_size, offset = writes[row] % page_size;
        char *to = (char *)kv + page * kv_heads * head_bytes + offset * 2 * bytes;
        for (int head = 0; head < kv_heads; head++, to += head_bytes) {
            memcpy(to, (const char *)k + (row * k_stride + head * size) * width, bytes);
            memcpy(to + bytes, (const char *)v + (row * v_stride + head * size) * width, bytes);
        }
    }
}
