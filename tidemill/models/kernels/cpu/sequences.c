/* Attention inside packed sequences, forward and backward, for training.
 *
 * Sequences form families: each shares its first tokens with the one before; one that shares nothing begins a new family.
 * Shared tokens are stored and computed once, and their gradient is the sum over all sequences that see them. A family and one
 * key/value head are a unit of work: its keys and values are laid out once, and for the next sequence only those that differ.
 *
 * All sums are float32. Scores are never kept: the backward pass computes them again from the logarithm of each query's total
 * weight (as in 2205.14135). bfloat16 queries, keys and values are multiplied as they are where pairs of bfloat16 are multiplied
 * fast; in the backward pass so are the weights, rounded as the gradients are in any case.
 */

#include "tiles.h"

#include <math.h>
#include <stdlib.h>

#define QUERIES 24     /* queries of one head and sequence per block */
#define KEYS 256       /* keys per block */
#define MOST_NUMBERS 128 /* largest size of a head */

/* Numbers [token, head, size], tokens `stride` numbers apart. */
typedef struct {
    char *numbers;
    int64_t stride;
    int32_t narrow, unused;
} operand;

/* families [F + 1]: the first sequence of each. sequences [B + 1]: where each begins in `places`, which holds the token of each
 * position. shared [B]: positions that a sequence has in common with the one before. */
typedef struct {
    const int64_t *families, *sequences, *places, *shared;
    int32_t count, longest, heads, kv_heads, size, window; /* window: positions that a query sees; 0: all before it */
} layout;

/* ---- products --------------------------------------------------------------------------------------------------- */

/* Operands of products: floats, or pairs of bfloat16 that are neighbours along the summed dimension. */
typedef union {
    float number;
    int32_t pair;
} unit;

INLINE vec added(int paired, vec sum, unit left, vec right) {
#ifdef PAIRS
    if (paired) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)right, (__m512bh)_mm512_set1_epi32(left.pair));
#endif
    return sum + left.number * right;
}

/* c [R, V vectors] = or += a [R, K] b [K, V vectors]. a's rows lie `down` apart and its columns `along`; K is in units. */
INLINE void tile(int paired, int R, int V, float *c, int64_t ldc, const unit *a, int64_t down, int64_t along, const unit *b,
                 int64_t ldb, int K, int adds) {
    vec sums[FULL];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) sums[r * V + v] = adds ? load(c + r * ldc + v * WIDTH, 0) : (vec){0};
    for (int k = 0; k < K; k++) {
        vec right[4];
        UNROLL for (int v = 0; v < V; v++) right[v] = load(b + k * ldb + v * WIDTH, 0);
        UNROLL for (int r = 0; r < R; r++) {
            const unit left = a[r * down + k * along];
            UNROLL for (int v = 0; v < V; v++) sums[r * V + v] = added(paired, sums[r * V + v], left, right[v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) memcpy(c + r * ldc + v * WIDTH, &sums[r * V + v], sizeof(vec));
}

INLINE void columns(int paired, int V, float *c, int64_t ldc, const unit *a, int64_t down, int64_t along, const unit *b,
                    int64_t ldb, int M, int K, int adds) {
    int m = 0;
#define ROWS_OF(R) tile(paired, R, V, c + m * ldc, ldc, a + m * down, down, along, b, ldb, K, adds)
    for (; m + FULL / V <= M && V > 1; m += FULL / V) ROWS_OF(FULL / V);
    for (; m + FULL / 2 <= M && V == 1; m += FULL / 2) ROWS_OF(FULL / 2);
    for (; m + 3 <= M; m += 3) ROWS_OF(3);
    for (; m < M; m++) ROWS_OF(1);
#undef ROWS_OF
}

/* c [M, N] = or += a [M, K] b [K, N], N a multiple of WIDTH. */
#define PRODUCT(NAME, PAIRED)                                                                                                  \
    static void NAME(float *c, int64_t ldc, const unit *a, int64_t down, int64_t along, const unit *b, int64_t ldb, int M,     \
                     int N, int K, int adds) {                                                                                 \
        int n = 0;                                                                                                             \
        for (; FULL >= 24 && n + 4 * WIDTH <= N; n += 4 * WIDTH)                                                               \
            columns(PAIRED, 4, c + n, ldc, a, down, along, b + n, ldb, M, K, adds);                                            \
        for (; n + 2 * WIDTH <= N; n += 2 * WIDTH) columns(PAIRED, 2, c + n, ldc, a, down, along, b + n, ldb, M, K, adds);     \
        for (; n < N; n += WIDTH) columns(PAIRED, 1, c + n, ldc, a, down, along, b + n, ldb, M, K, adds);                      \
    }
PRODUCT(product_of_floats, 0)
PRODUCT(product_of_pairs, 1)

INLINE void product(int paired, float *c, int64_t ldc, const unit *a, int64_t down, int64_t along, const unit *b, int64_t ldb,
                    int M, int N, int K, int adds) {
    if (paired) product_of_pairs(c, ldc, a, down, along, b, ldb, M, N, K, adds);
    else product_of_floats(c, ldc, a, down, along, b, ldb, M, N, K, adds);
}

/* Puts numbers into pairs, as first ones (the second ones become 0) or as second ones. */
INLINE void pair_up(ints bits, int second, unit *pairs) {
    if (second) bits = ((ints)load(pairs, 0) & 0xffff) | bits << 16;
    memcpy(pairs, &bits, sizeof bits);
}

/* ---- one key/value head of a sequence --------------------------------------------------------------------------- */

/* A family's keys and values by position, also transposed: [size, row]. If paired, they are grouped by pairs of positions, and by
 * pairs of numbers where transposed. */
typedef struct {
    int64_t row;
    unit *keys, *values, *upright_keys, *upright_values;
    float *d_keys, *d_values; /* backward pass only; zero between families */
} room;

/* Work memory of a block of queries: [QUERIES, KEYS] and [QUERIES, size]. */
typedef struct {
    float weights[QUERIES * KEYS], d_weights[QUERIES * KEYS];
    unit asked[QUERIES * MOST_NUMBERS], d_seen[QUERIES * MOST_NUMBERS];
    float d_asked[QUERIES * MOST_NUMBERS], seen[QUERIES * MOST_NUMBERS];
    float greatest[QUERIES], total[QUERIES], drawn[QUERIES];
    /* The same, paired: d_weights along keys, all others along queries. */
    unit weight_pairs[QUERIES / 2 * KEYS], d_weight_pairs[QUERIES / 2 * KEYS], d_weight_rows[QUERIES * KEYS / 2];
    unit asked_pairs[QUERIES / 2 * MOST_NUMBERS], d_seen_pairs[QUERIES / 2 * MOST_NUMBERS];
} work;

INLINE void read(const operand *from, int64_t token, int head, int size, float *to) {
    widen(from->numbers, token * from->stride + (int64_t)head * size, size, from->narrow, to);
}

INLINE void write(const float *from, const operand *to, int64_t token, int head, int size) {
    put(from, size, to->narrow, to->numbers, token * to->stride + (int64_t)head * size);
}

/* Loads a row as floats, or unchanged if paired. */
INLINE void read_units(int paired, const operand *from, int64_t token, int head, int size, unit *to) {
    if (paired) memcpy(to, from->numbers + (token * from->stride + (int64_t)head * size) * 2, size * 2);
    else read(from, token, head, size, &to->number);
}

/* Interleaves the numbers of an even row with those of the next. */
INLINE void pair_narrow(const unit *rows, int size, int second, unit *pairs) {
    for (int i = 0; i < size; i += WIDTH) {
        shorts bits;
        memcpy(&bits, (const uint16_t *)rows + i, sizeof bits);
        pair_up(__builtin_convertvector(bits, ints), second, pairs + i);
    }
}

/* The same for floats, which are rounded. */
INLINE void pair_rounded(const float *numbers, int n, int second, unit *pairs) {
    for (int i = 0; i < n; i += WIDTH) pair_up(nearest(load(numbers + i, 0)) >> 16 & 0xffff, second, pairs + i);
}

static void lay_out(const int paired, const operand *from, const int64_t *places, int begin, int end, int head, int size,
                    int64_t row, unit *lying, unit *upright) {
    const int units = paired ? size / 2 : size;
    for (int at = begin; at < end;) {
        unit numbers[WIDTH][MOST_NUMBERS];
        const int count = end - at < WIDTH ? end - at : WIDTH;
        for (int i = 0; i < count; i++) {
            read_units(paired, from, places[at + i], head, size, numbers[i]);
            if (lying && paired) pair_narrow(numbers[i], size, (at + i) % 2, lying + (int64_t)(at + i) / 2 * size);
            else if (lying) memcpy(lying + (int64_t)(at + i) * size, numbers[i], size * sizeof(unit));
        }
        int to = 0;
        for (; upright && count == WIDTH && to + WIDTH <= units; to += WIDTH) {
            ints square[WIDTH];
            UNROLL for (int i = 0; i < WIDTH; i++) memcpy(&square[i], &numbers[i][to], sizeof(ints));
            turn(square);
            UNROLL for (int i = 0; i < WIDTH; i++) memcpy(&upright[(to + i) * row + at], &square[i], sizeof(ints));
        }
        for (; upright && to < units; to++)
            for (int i = 0; i < count; i++) upright[to * row + at + i] = numbers[i][to];
        at += count;
    }
}

/* Range [*low, *end) of the keys that the query at `position` sees in the block from `first` on. */
INLINE void sight(int position, int window, int first, int *low, int *end) {
    const int from = window && position - window + 1 > first ? position - window + 1 - first : 0;
    *end = position + 1 - first < 0 ? 0 : position + 1 - first < KEYS ? position + 1 - first : KEYS;
    *low = from < *end ? from : *end;
}

INLINE int up_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

/* Greatest of the scores [low, end). */
static float greatest(const float *scores, int low, int end) {
    float most = -INFINITY;
    _Pragma("omp simd reduction(max : most)") for (int j = low; j < end; j++) most = scores[j] > most ? scores[j] : most;
    return most;
}

/* Replaces scores [low, end) by e^(score * scale - most), and the rest of `wide` scores by 0. Returns their sum. */
static float exponentials(float *scores, int low, int end, int wide, float scale, float most) {
    vec sums = {0};
    float sum = 0;
    for (int j = 0; j < wide; j += WIDTH) {
        vec value;
        for (int lane = 0; lane < WIDTH; lane++) value[lane] = exponential(scores[j + lane] * scale - most);
        const ints at = LANES + j, seen = (at >= low) & (at < end);
        value = (vec)((ints)value & seen);
        memcpy(scores + j, &value, sizeof value);
        sums += value;
    }
    for (int lane = 0; lane < WIDTH; lane++) sum += sums[lane];
    return sum;
}

/* First block that any query from `position` on sees. */
INLINE int first_block(int position, int window) {
    return window && position - window + 1 > 0 ? (position - window + 1) / KEYS * KEYS : 0;
}

INLINE void forward(const int paired, const layout *all, const room *kv, const operand *q, const operand *out, float *totals,
                    const int64_t *places, int begin, int count, int head, float scale, work *w) {
    const int size = all->size, last = begin + count - 1, units = paired ? size / 2 : size;
    for (int i = 0; i < count; i++) {
        read_units(paired, q, places[begin + i], head, size, w->asked + i * units);
        w->greatest[i] = -INFINITY, w->total[i] = 0;
    }
    memset(w->seen, 0, count * size * sizeof(float));
    for (int first = first_block(begin, all->window); first <= last; first += KEYS) {
        const int n = last + 1 - first < KEYS ? last + 1 - first : KEYS, wide = up_to(n, WIDTH);
        product(paired, w->weights, KEYS, w->asked, units, 1, kv->upright_keys + first, kv->row, count, wide, units, 0);
        for (int i = 0; i < count; i++) {
            float *scores = w->weights + i * KEYS;
            int low, end;
            sight(begin + i, all->window, first, &low, &end);
            const float most = greatest(scores, low, end) * scale;
            if (most > w->greatest[i]) {
                const float less = w->total[i] ? exponential(w->greatest[i] - most) : 0;
                for (int e = 0; e < size; e++) w->seen[i * size + e] *= less;
                w->total[i] *= less, w->greatest[i] = most;
            }
            w->total[i] += exponentials(scores, low, end, wide, scale, w->greatest[i]);
        }
        product(0, w->seen, size, (unit *)w->weights, KEYS, 1, kv->values + (int64_t)first * size, size, count, size, n, 1);
    }
    for (int i = 0; i < count; i++) {
        for (int e = 0; e < size; e++) w->seen[i * size + e] /= w->total[i];
        write(w->seen + i * size, out, places[begin + i], head, size);
        totals[places[begin + i] * all->heads + head] = w->greatest[i] + logf(w->total[i]);
    }
}

INLINE void backward(const int paired, const layout *all, const room *kv, const operand *q, const operand *out,
                     const operand *d_out, const operand *d_q, const float *totals, const int64_t *places, int begin, int count,
                     int head, float scale, work *w) {
    const int size = all->size, last = begin + count - 1, units = paired ? size / 2 : size;
    for (int i = 0; i < count; i++) {
        const int64_t token = places[begin + i];
        float seen[MOST_NUMBERS], d_seen[MOST_NUMBERS], sum = 0;
        read_units(paired, q, token, head, size, w->asked + i * units);
        read_units(paired, d_out, token, head, size, w->d_seen + i * units);
        read(out, token, head, size, seen);
        read(d_out, token, head, size, d_seen);
        _Pragma("omp simd reduction(+ : sum)") for (int e = 0; e < size; e++) sum += seen[e] * d_seen[e];
        w->drawn[i] = sum, w->total[i] = totals[token * all->heads + head];
        if (paired) {
            pair_narrow(w->asked + i * units, size, i % 2, w->asked_pairs + i / 2 * size);
            pair_narrow(w->d_seen + i * units, size, i % 2, w->d_seen_pairs + i / 2 * size);
        }
    }
    memset(w->d_asked, 0, count * size * sizeof(float));
    for (int first = first_block(begin, all->window); first <= last; first += KEYS) {
        const int n = last + 1 - first < KEYS ? last + 1 - first : KEYS, wide = up_to(n, WIDTH), pairs = (count + 1) / 2;
        float *d_values = kv->d_values + (int64_t)first * size, *d_keys = kv->d_keys + (int64_t)first * size;
        product(paired, w->weights, KEYS, w->asked, units, 1, kv->upright_keys + first, kv->row, count, wide, units, 0);
        product(paired, w->d_weights, KEYS, w->d_seen, units, 1, kv->upright_values + first, kv->row, count, wide, units, 0);
        for (int i = 0; i < count; i++) {
            float *weights = w->weights + i * KEYS, *d_weights = w->d_weights + i * KEYS;
            const float drawn = w->drawn[i];
            int low, end;
            sight(begin + i, all->window, first, &low, &end);
            exponentials(weights, low, end, wide, scale, w->total[i]);
            for (int j = 0; j < wide; j++) d_weights[j] = weights[j] ? weights[j] * (d_weights[j] - drawn) : 0; /* 0: not seen */
            if (paired) {
                pair_rounded(weights, wide, i % 2, w->weight_pairs + i / 2 * KEYS);
                pair_rounded(d_weights, wide, i % 2, w->d_weight_pairs + i / 2 * KEYS);
                put(d_weights, wide, 1, w->d_weight_rows, i * KEYS);
            }
        }
        if (paired) {
            product(1, d_values, size, w->weight_pairs, 1, KEYS, w->d_seen_pairs, size, n, size, pairs, 1);
            product(1, d_keys, size, w->d_weight_pairs, 1, KEYS, w->asked_pairs, size, n, size, pairs, 1);
            product(1, w->d_asked, size, w->d_weight_rows, KEYS / 2, 1, kv->keys + (int64_t)first / 2 * size, size, count, size,
                    (n + 1) / 2, 1);
        } else {
            product(0, d_values, size, (unit *)w->weights, 1, KEYS, w->d_seen, size, n, size, count, 1);
            product(0, d_keys, size, (unit *)w->d_weights, 1, KEYS, w->asked, size, n, size, count, 1);
            product(0, w->d_asked, size, (unit *)w->d_weights, KEYS, 1, kv->keys + (int64_t)first * size, size, count, size, n, 1);
        }
    }
    for (int i = 0; i < count; i++) {
        for (int e = 0; e < size; e++) w->d_asked[i * size + e] *= scale;
        write(w->d_asked + i * size, d_q, places[begin + i], head, size);
    }
}

/* ---- families --------------------------------------------------------------------------------------------------- */

typedef struct {
    operand q, k, v, out, d_out, d_q, d_k, d_v;
    float *totals; /* [tokens, heads] */
    float scale;
    int32_t back;
} tensors;

/* Moves the gradients of positions [begin, end) to the output, and clears the work memory. */
static void hand_over(const room *kv, const tensors *t, const int64_t *places, int begin, int end, int head, int size) {
    for (int at = begin; at < end; at++) {
        float *d_key = kv->d_keys + (int64_t)at * size;
        for (int e = 0; e < size; e++) d_key[e] *= t->scale;
        write(d_key, &t->d_k, places[at], head, size);
        write(kv->d_values + (int64_t)at * size, &t->d_v, places[at], head, size);
    }
    memset(kv->d_keys + (int64_t)begin * size, 0, (int64_t)(end - begin) * size * sizeof(float));
    memset(kv->d_values + (int64_t)begin * size, 0, (int64_t)(end - begin) * size * sizeof(float));
}

INLINE void family(const int paired, const layout *all, const tensors *t, int64_t number, int kv_head, const room *kv, work *w) {
    const int size = all->size, group = all->heads / all->kv_heads;
    const int64_t end = all->families[number + 1];
    for (int64_t i = all->families[number]; i < end; i++) {
        const int64_t *places = all->places + all->sequences[i];
        const int length = (int)(all->sequences[i + 1] - all->sequences[i]), own = (int)all->shared[i];
        lay_out(paired, &t->k, places, own, length, kv_head, size, kv->row, t->back ? kv->keys : NULL, kv->upright_keys);
        if (t->back) lay_out(paired, &t->v, places, own, length, kv_head, size, kv->row, NULL, kv->upright_values);
        else lay_out(0, &t->v, places, own, length, kv_head, size, kv->row, kv->values, NULL);
        for (int at = own; at < length; at += QUERIES) {
            const int count = length - at < QUERIES ? length - at : QUERIES;
            for (int head = kv_head * group; head < (kv_head + 1) * group; head++)
                if (t->back)
                    backward(paired, all, kv, &t->q, &t->out, &t->d_out, &t->d_q, t->totals, places, at, count, head, t->scale, w);
                else
                    forward(paired, all, kv, &t->q, &t->out, t->totals, places, at, count, head, t->scale, w);
        }
        if (t->back) hand_over(kv, t, places, i + 1 < end ? (int)all->shared[i + 1] : 0, length, kv_head, size);
    }
}

static void family_of_floats(const layout *all, const tensors *t, int64_t number, int kv_head, const room *kv, work *w) {
    family(0, all, t, number, kv_head, kv, w);
}

static void family_of_pairs(const layout *all, const tensors *t, int64_t number, int kv_head, const room *kv, work *w) {
    family(1, all, t, number, kv_head, kv, w);
}

/* Forward: out and totals from q, k and v. Backward: d_q, d_k and d_v from these and d_out. Returns 0, or 1 if there is no memory.
 * Each number is computed by one thread, in an order that does not depend on the number of threads. */
int tidemill_sequences(const layout *all, const tensors *t, int threads) {
    const int64_t row = up_to(all->longest, WIDTH) + KEYS, part = row * all->size, pieces = (int64_t)all->count * all->kv_heads;
    const int paired = t->q.narrow && t->k.narrow && t->v.narrow && tidemill_pairs_are_quick();
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *memory = calloc(6 * part, sizeof(float)), *d_keys = memory + 4 * part;
        unit *units = (unit *)memory;
        work *w = aligned_alloc(64, up_to(sizeof(work), 64));
        const room kv = {row, units, units + part, units + 2 * part, units + 3 * part, d_keys, d_keys + part};
        failed = !memory || !w;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pieces; i++)
            if (!failed) (paired ? family_of_pairs : family_of_floats)(all, t, i / all->kv_heads, (int)(i % all->kv_heads), &kv, w);
        free(memory), free(w);
    }
    return failed;
}
