/* Which samples an output sample is made of, and how much of each: a triangle filter as 16-bit integers. */
#ifndef PACELINE_TAPS_H
#define PACELINE_TAPS_H

#include <stddef.h>
#include <stdint.h>

#define PL_WEIGHT_BITS 14 /* the weights of one output sample sum to 1 << PL_WEIGHT_BITS, exactly */

/* How one axis of a component is read, in samples of the component. */
typedef struct {
  double start, length; /* what becomes the whole output */
  int low, high;        /* the filter sees samples [low, high) alone */
  int parts;            /* each sample is the mean of so many: the component's reduction */
  double from, to;      /* a part counts if its center lies in here: so the samples at the ends count in part */
} pl_axis;

/* Output i is the sum of weights[i * num_taps + j] times sample starts[i] + j, for j < num_taps. No start is negative;
 * none is less than the one before; where `num_taps` goes beyond the samples there are, by one, the weight is 0. */
typedef struct {
  int size;     /* output samples */
  int num_taps; /* of every output: even, and as few as the longest needs */
  int32_t *starts;
  int16_t *weights;
} pl_taps;

/* Find samples [first, last) that `size` outputs are made of. */
void pl_axis_extent(const pl_axis *axis, int size, int *first, int *last);

/* Return the memory that pl_taps_make needs: a multiple of 64. */
size_t pl_taps_bytes(const pl_axis *axis, int size);

/* Make the filter in `memory`, aligned to 64 bytes. Starts count from sample `origin`, of which the axis needs none
 * before, and are multiples of `multiple` (1 or 2). */
void pl_taps_make(const pl_axis *axis, int size, int origin, int multiple, void *memory, pl_taps *taps);

#endif
