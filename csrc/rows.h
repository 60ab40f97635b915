/* The source of upsample.c and upsample_avx2.c: plain loops, which compilers make vectors of. */
#ifndef PACELINE_ROWS_H
#define PACELINE_ROWS_H

#include "bits.h"
#include "upsample.h"

PL_INLINE void pl_blend(const uint8_t *restrict near, const uint8_t *restrict far, size_t n, unsigned bias,
                        uint8_t *restrict out) {
  for (size_t i = 0; i < n; i++) out[i] = (uint8_t)((3u * near[i] + far[i] + bias) >> 2);
}

PL_INLINE void pl_widen(const uint8_t *restrict row, size_t n, uint8_t *restrict out) {
  out[0] = row[0];
  for (size_t i = 0; i + 1 < n; i++) {
    out[2 * i + 1] = (uint8_t)((3u * row[i] + row[i + 1] + 2) >> 2);
    out[2 * i + 2] = (uint8_t)((3u * row[i + 1] + row[i] + 1) >> 2);
  }
  out[2 * n - 1] = row[n - 1];
}

PL_INLINE void pl_widen_blended(const uint8_t *restrict near, const uint8_t *restrict far, size_t n,
                                uint16_t *restrict sums, uint8_t *restrict out) {
  for (size_t i = 0; i < n; i++) sums[i] = (uint16_t)(3u * near[i] + far[i]);
  out[0] = (uint8_t)((4u * sums[0] + 8) >> 4);
  for (size_t i = 0; i + 1 < n; i++) {
    out[2 * i + 1] = (uint8_t)((3u * sums[i] + sums[i + 1] + 7) >> 4);
    out[2 * i + 2] = (uint8_t)((3u * sums[i + 1] + sums[i] + 8) >> 4);
  }
  out[2 * n - 1] = (uint8_t)((4u * sums[n - 1] + 7) >> 4);
}

PL_INLINE uint8_t pl_clamp(int32_t value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

/* The factors 1.402, 1.772, 0.34414 and 0.71414 times 2^16 are those of jdcolor.c. */
PL_INLINE void pl_to_rgb(const uint8_t *restrict luma, const uint8_t *restrict blue, const uint8_t *restrict red,
                         size_t n, uint8_t *restrict out) {
  const int32_t half = 1 << 15;
  for (size_t i = 0; i < n; i++) {
    int32_t y = luma[i], cb = blue[i] - 128, cr = red[i] - 128;
    out[3 * i] = pl_clamp(y + ((91881 * cr + half) >> 16));
    out[3 * i + 1] = pl_clamp(y + ((half - 22554 * cb - 46802 * cr) >> 16));
    out[3 * i + 2] = pl_clamp(y + ((116130 * cb + half) >> 16));
  }
}

PL_INLINE void pl_to_grey(const uint8_t *restrict rgb, size_t n, uint8_t *restrict out) {
  for (size_t i = 0; i < n; i++) {
    out[i] = (uint8_t)((19595u * rgb[3 * i] + 38470u * rgb[3 * i + 1] + 7471u * rgb[3 * i + 2] + 0x8000u) >> 16);
  }
}

#endif
