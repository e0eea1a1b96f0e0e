/* Products of bfloat16, where a processor has them: of pairs in vectors, and of matrices in tiles, sixteen rows of 64 bytes each. */

#pragma once

#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PAIRS
#include <immintrin.h>
#endif

#if defined(PAIRS) && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define TILES

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) shape;
#endif

/* Whether there are tiles, and the system lets us use them; the first call asks it. */
int tidemill_tiles(void);

/* Whether adding up pairs is quicker than widening them and adding up floats. */
int tidemill_pairs_are_quick(void);

/* Squares of 16 by 16 units of four bytes, turned. */
#define EXCHANGE(n) INLINE void exchange##n(ints *a, ints *b) { const ints x = *a, y = *b; *a = EVEN##n(x, y); *b = ODD##n(x, y); }
EXCHANGE(1)
EXCHANGE(2)
EXCHANGE(4)
EXCHANGE(8)

INLINE void turn(ints *square) {
    UNROLL for (int i = 0; i < 16; i += 2) exchange1(&square[i], &square[i + 1]);
    UNROLL for (int i = 0; i < 16; i++) if (!(i & 2)) exchange2(&square[i], &square[i + 2]);
    UNROLL for (int i = 0; i < 16; i++) if (!(i & 4)) exchange4(&square[i], &square[i + 4]);
    UNROLL for (int i = 0; i < 8; i++) exchange8(&square[i], &square[i + 8]);
}
