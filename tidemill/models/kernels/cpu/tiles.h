/* bfloat16 products of processors: of pairs in vectors, and of matrices in tiles of sixteen rows of 64 bytes. */

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

/* True if there are tiles that the system allows; the first call asks for permission. */
int tidemill_tiles(void);

/* True if adding up pairs is faster than widening them to floats first. */
int tidemill_pairs_are_quick(void);
