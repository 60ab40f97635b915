/* Batches of images that are pixels already: padded, cut to their own size and mirrored, row by row. */
#include "move.h"

#include <string.h>

#include "paceline.h"

#define AHEAD 4              /* images: as far as their order is random, the processor cannot guess the next one */
#define AHEAD_BYTES 4096     /* of each: a photograph would push out what is in use */
#define CACHE_LINE_BYTES 64

typedef void reverse_rows(const uint8_t *source, size_t count, uint8_t *out);

static void reverse_scalar(const uint8_t *source, size_t count, uint8_t *out) {
  for (size_t i = 0; i < count; i++) out[i] = source[count - 1 - i];
}

static void copy(const uint8_t *source, size_t count, uint8_t *out) { memcpy(out, source, count); }

static int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

/* Make one row of three parts: columns before the source's first, the source's own, and those beyond its last. */
static void move_row(const uint8_t *source, const pl_motion *motion, reverse_rows *reverse, uint8_t *out) {
  const int width = motion->columns.length, shift = motion->columns.shift;
  const int first = clamp(-shift, 0, width), last = clamp(width - shift, 0, width);
  const size_t before = (size_t)first, beyond = (size_t)(width - last);
  const size_t within = last > first ? (size_t)(last - first) : 0;
  uint8_t *before_at = motion->flip ? out + (width - first) : out;
  uint8_t *within_at = motion->flip ? out + (width - last) : out + first;
  uint8_t *beyond_at = motion->flip ? out : out + last;
  if (within) (motion->flip ? reverse : copy)(source + (first + shift), within, within_at);
  if (!motion->columns.reflect) {
    memset(before_at, 0, before);
    memset(beyond_at, 0, beyond);
    return;
  }
  /* A reflection runs backwards: mirrored, it runs forwards again. */
  reverse_rows *turned = motion->flip ? copy : reverse;
  turned(source + 1, before, before_at);
  turned(source + (width - 1) - beyond, beyond, beyond_at);
}

static void move_image(const uint8_t *image, const pl_motion *motion, reverse_rows *reverse, uint8_t *out) {
  const int height = motion->rows.length;
  const size_t width = (size_t)motion->columns.length;
  for (int channel = 0; channel < motion->channels; channel++) {
    for (int y = 0; y < height; y++, out += width) {
      int source = pl_source_of(&motion->rows, y);
      if (source < 0) {
        memset(out, 0, width);
      } else {
        move_row(image + (size_t)source * width, motion, reverse, out);
      }
    }
    image += (size_t)height * width;
  }
}

static void prefetch(const uint8_t *image, size_t num_bytes) {
  for (size_t at = 0; at < num_bytes && at < AHEAD_BYTES; at += CACHE_LINE_BYTES) __builtin_prefetch(image + at);
}

void pl_move(const uint8_t *images, const int64_t *indices, const int32_t *tops, const int32_t *lefts,
             const uint8_t *flips, size_t n, int channels, int height, int width, int padding, int reflect,
             uint8_t *out) {
  const size_t num_bytes = (size_t)channels * (size_t)height * (size_t)width;
  reverse_rows *reverse = reverse_scalar;
#if defined(__x86_64__)
  const int narrow = pl_isa_now() == PL_AVX2 && width >= PL_NARROWEST && width <= PL_WIDEST;
  if (pl_isa_now() == PL_AVX2) reverse = pl_reverse_avx2;
#endif
  for (size_t i = 0; i < n; i++, out += num_bytes) {
    if (n - i > AHEAD) prefetch(images + (size_t)indices[i + AHEAD] * num_bytes, num_bytes);
    const uint8_t *image = images + (size_t)indices[i] * num_bytes;
    const pl_motion motion = {.rows = {height, tops[i] - padding, reflect},
                              .columns = {width, lefts[i] - padding, reflect},
                              .channels = channels,
                              .flip = flips[i] != 0};
#if defined(__x86_64__)
    if (narrow) {
      pl_move_narrow_avx2(image, &motion, out);
      continue;
    }
#endif
    move_image(image, &motion, reverse, out);
  }
}
