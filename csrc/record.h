/* The layout of a record, for those who read and write one: docs/reference/indexed-jpeg.md. */
#ifndef PACELINE_RECORD_H
#define PACELINE_RECORD_H

#include <stdbool.h>

#include "paceline.h"

#define PL_MAGIC "PJ1" /* and the 0 that ends it */
#define PL_HEADER_BYTES 32
#define PL_MAX_MCU_BLOCKS 10 /* T.81, B.2.3, and libjpeg's D_MAX_BLOCKS_IN_MCU */

static inline uint64_t pl_round_up4(uint64_t size) { return (size + 3) / 4 * 4; }

/* Set what follows from size, sampling factors and `every`. Return false for factors that are not taken. */
bool pl_record_set_geometry(pl_record *record);

#endif
