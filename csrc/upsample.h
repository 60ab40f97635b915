/* Rows of chroma brought to full width and height, and colors: libjpeg's arithmetic, bit for bit.
 *
 * "Fancy" upsampling (jdsample.c of libjpeg-turbo) takes 3/4 of the nearer sample and 1/4 of the farther, in each
 * direction that is halved. Elsewhere samples are repeated. The same source is compiled twice (upsample.c,
 * upsample_avx2.c).
 */
#ifndef PACELINE_UPSAMPLE_H
#define PACELINE_UPSAMPLE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
  /* out[i] = 3/4 near[i] + 1/4 far[i], `bias` (1 or 2) added before the shift. */
  void (*blend)(const uint8_t *near, const uint8_t *far, size_t n, unsigned bias, uint8_t *out);
  /* Double the width of n > 2 samples. */
  void (*widen)(const uint8_t *row, size_t n, uint8_t *out);
  /* Double the width of 3 near + 1 far, n > 2; `sums` holds n numbers. */
  void (*widen_blended)(const uint8_t *near, const uint8_t *far, size_t n, uint16_t *sums, uint8_t *out);
  /* From YCbCr to RGB, three bytes a pixel. */
  void (*to_rgb)(const uint8_t *luma, const uint8_t *blue, const uint8_t *red, size_t n, uint8_t *out);
  /* From RGB to gray as Pillow converts to L: (19595 R + 38470 G + 7471 B + 2^15) / 2^16. */
  void (*to_grey)(const uint8_t *rgb, size_t n, uint8_t *out);
} pl_row_functions;

extern const pl_row_functions pl_rows_scalar;
#if defined(__x86_64__)
extern const pl_row_functions pl_rows_avx2;
#endif

#endif
