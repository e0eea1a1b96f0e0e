/* Products of bfloat16, where a processor has them: of pairs in vectors, and of matrices in tiles, sixteen rows of 64 bytes each. */

#pragma once

#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && WIDTH == 16
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
