/* How an image is shifted and mirrored: what move.c and its AVX2 version share. */
#ifndef PACELINE_MOVE_H
#define PACELINE_MOVE_H

#include <stddef.h>
#include <stdint.h>

/* Rows or columns of an image that are those of its source, `shift` further on. Where the source has none they are
 * zero, or reflected: counted back from the edge, the edge itself not repeated (torch's F.pad, mode "reflect"). */
typedef struct {
  int length, shift, reflect;
} pl_shift;

typedef struct {
  pl_shift rows, columns;
  int channels, flip; /* mirrored left to right after the shift */
} pl_motion;

/* Return where in the source `position` comes from, or -1 for zero. */
static inline int pl_source_of(const pl_shift *shift, int position) {
  int source = position + shift->shift;
  if (source >= 0 && source < shift->length) return source;
  if (!shift->reflect) return -1;
  return source < 0 ? -source : 2 * (shift->length - 1) - source;
}

#if defined(__x86_64__)
/* Images this wide fit two overlapping halves of a register, row by row. */
#define PL_NARROWEST 16
#define PL_WIDEST 32

/* Move one image of PL_NARROWEST to PL_WIDEST columns. */
void pl_move_narrow_avx2(const uint8_t *image, const pl_motion *motion, uint8_t *out);

/* out[i] = source[count - 1 - i]. */
void pl_reverse_avx2(const uint8_t *source, size_t count, uint8_t *out);
#endif

#endif
