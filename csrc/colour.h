/* From resized samples to 8-bit colors, in the layout that resizing leaves: element by element.
 *
 * YCbCr to RGB as JFIF (ITU-T T.871, section 7) has it, with 15-bit factors. */
#ifndef PACELINE_COLOUR_H
#define PACELINE_COLOUR_H

#include <stddef.h>
#include <stdint.h>

#include "resize.h"

/* The factors' distance from a whole number, times 1 << 15, which 16 bits with sign hold. */
#define PL_FACTOR_BITS 15
#define PL_RED_OF_CR 13173    /* 1.402 - 1 */
#define PL_GREEN_OF_CB -11277 /* -0.344136 */
#define PL_GREEN_OF_CR 9367   /* 1 - 0.714136 */
#define PL_BLUE_OF_CB -7471   /* 1.772 - 2 */

#define PL_GREY_CHROMA (128 << PL_FRACTION_BITS)
#define PL_COLOUR_HALF (1 << (PL_FRACTION_BITS - 1))

/* Return the memory of one channel of `num_samples`, and what may be written beyond them: a multiple of 64. */
static inline size_t pl_channel_bytes(size_t num_samples) { return (num_samples + 127) / 64 * 64; }

/* Convert `num_samples`, a multiple of PL_ROWS; up to 31 beyond them may be read and written. */
typedef void pl_to_rgb(const int16_t *const ycc[3], size_t num_samples, uint8_t *const rgb[3]);
typedef void pl_to_grey(const int16_t *luma, size_t num_samples, uint8_t *grey);

pl_to_rgb pl_to_rgb_scalar;
pl_to_grey pl_to_grey_scalar;
#if defined(__x86_64__)
pl_to_rgb pl_to_rgb_avx2;
pl_to_grey pl_to_grey_avx2;
#endif

#endif
