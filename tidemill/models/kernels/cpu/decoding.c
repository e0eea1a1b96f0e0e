/* A whole decoder pass over rows of one token each, whose sequences are in pages.
 *
 * Each thread takes its own rows through all layers: it waits for no other thread, and its results stay in its caches. Every
 * thread reads all matrices, so this pays from some number of rows per thread on.
 */

#include "rows.h"
#include "vectors.h"

/* Weights of a layer. Matrices are packed; biases and the norms of queries and keys may be NULL. */
typedef struct {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias;
    const void *post_norm, *gate_up, *gate_up_bias, *down, *down_bias;
} layer;

typedef struct {
    const layer *layers;
    const void *embedding, *norm;
    int count, hidden, q_heads, kv_heads, size, intermediate, narrow, products; /* products: see linear.c */
    float eps;
} decoder;

/* Rows: `tokens` [n] at `positions` [n], which index cos and sin [.., size / 2]. The result of row i is row to[i] of out [n,
 * hidden]. Each layer has its own `lows`, and its pages lie `layer_bytes` behind those of the layer before. For the other fields
 * see `paged_queries` and `tidemill_write`. Rows that begin with the same pages are neighbours. Thread i takes rows parts[i] to
 * parts[i + 1]; none of them reads what another thread writes. */
typedef struct {
    const int64_t *tokens, *positions, *to;
    void *out;
    const void *cos, *sin;
    char *pages, *room; /* room: `tidemill_decoding_room` bytes for each thread */
    const int32_t *table;
    const int64_t *slots, *const *lows, *ends, *writes, *order, *parts; /* order: 0 .. n - 1 */
    int64_t layer_bytes, table_stride;
    int page_size;
} rows;

/* x += y, of n numbers. */
static void add(void *x, const void *y, int narrow, int64_t n) {
    const int width = narrow ? 2 : 4;
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        const vec sum = load((char *)x + i * width, narrow) + load((const char *)y + i * width, narrow);
        put((const float *)&sum, WIDTH, narrow, x, i);
    }
    for (; i < n; i++) store(x, i, number(x, i, narrow) + number(y, i, narrow), narrow);
}

/* Work memory of n rows: hidden states; angles; input or output of a product; and heads, rotated heads and attention output, or
 * gates. */
int64_t tidemill_decoding_room(const decoder *of, int n) {
    const int64_t heads = (int64_t)of->size * (3 * of->q_heads + 3 * of->kv_heads), gates = 3 * (int64_t)of->intermediate;
    return (2 * of->hidden + of->size + (heads > gates ? heads : gates)) * n * (of->narrow ? 2 : 4);
}

/* Takes rows [first, last) through all layers. Returns 0, or another number if something failed. */
static int decode(const decoder *of, const rows *at, int first, int last, char *room) {
    const int n = last - first, narrow = of->narrow, how = of->products, size = of->size, hidden = of->hidden;
    const int q_heads = of->q_heads, kv_heads = of->kv_heads, turns = q_heads + kv_heads, heads = turns + kv_heads;
    const int intermediate = of->intermediate;
    const int64_t width = narrow ? 2 : 4, head = size * width, row = hidden * width;
    char *x = room, *line = x + n * row, *cos = line + n * row, *sin = cos + n * head / 2, *wide = sin + n * head / 2;
    char *turned = wide + n * heads * head, *seen = turned + n * turns * head, *gated = wide + n * 2 * intermediate * width;
    for (int i = 0; i < n; i++) {
        const int64_t angles = at->positions[first + i] * head / 2;
        memcpy(x + i * row, (const char *)of->embedding + at->tokens[first + i] * row, row);
        memcpy(cos + i * head / 2, (const char *)at->cos + angles, head / 2);
        memcpy(sin + i * head / 2, (const char *)at->sin + angles, head / 2);
    }
    const float scale = 1.0f / __builtin_sqrtf((float)size);
    int failed = 0;
    for (int i = 0; i < of->count; i++) {
        const layer *l = &of->layers[i];
        char *pages = at->pages + i * at->layer_bytes;
        tidemill_norm(x, hidden, narrow, l->input_norm, narrow, of->eps, line, narrow, n, hidden, 1);
        failed |= tidemill_linear(line, hidden, l->qkv, l->qkv_bias, wide, how, narrow, n, heads * size, hidden, 1);
        tidemill_rotate(wide, heads * size, narrow, l->q_norm, l->k_norm, narrow, of->eps, cos, sin, narrow, turned, n, turns,
                        q_heads, size, 1);
        tidemill_write(pages, (int)width, turned + q_heads * head, turns * size, wide + turns * head, heads * size,
                       at->writes + first, n, kv_heads, size, at->page_size);
        const paged_queries queries = {
            .kv = pages, .q = turned, .out = seen, .table = at->table, .slots = at->slots + first, .lows = at->lows[i] + first,
            .ends = at->ends + first, .order = at->order, .q_stride = turns * size, .table_stride = at->table_stride, .n = n,
            .q_heads = q_heads, .kv_heads = kv_heads, .size = size, .page_size = at->page_size, .narrow = narrow, .scale = scale,
        };
        failed |= tidemill_attend(&queries, 1);
        failed |= tidemill_linear(seen, q_heads * size, l->o, l->o_bias, line, how, narrow, n, hidden, q_heads * size, 1);
        add(x, line, narrow, (int64_t)n * hidden);
        tidemill_norm(x, hidden, narrow, l->post_norm, narrow, of->eps, line, narrow, n, hidden, 1);
        failed |= tidemill_linear(line, hidden, l->gate_up, l->gate_up_bias, wide, how, narrow, n, 2 * intermediate, hidden, 1);
        tidemill_gate(wide, narrow, gated, n, intermediate, 1);
        failed |= tidemill_linear(gated, intermediate, l->down, l->down_bias, line, how, narrow, n, hidden, intermediate, 1);
        add(x, line, narrow, (int64_t)n * hidden);
    }
    tidemill_norm(x, hidden, narrow, of->norm, narrow, of->eps, line, narrow, n, hidden, 1);
    for (int i = 0; i < n; i++) memcpy((char *)at->out + at->to[first + i] * row, line + i * row, row);
    return failed;
}

/* Returns 0, or another number if there is no memory or `tidemill_attend` has no code for these heads. */
int tidemill_decode(const decoder *of, const rows *at, int threads) {
    int most = 0, failed = 0;
    for (int part = 0; part < threads; part++) {
        const int n = (int)(at->parts[part + 1] - at->parts[part]);
        most = n > most ? n : most;
    }
    const int64_t room = tidemill_decoding_room(of, most);
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : failed) if (threads > 1)
    for (int part = 0; part < threads; part++) {
        failed |= decode(of, at, (int)at->parts[part], (int)at->parts[part + 1], at->room + part * room);
    }
    return failed;
}
