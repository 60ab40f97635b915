/* From the planes of a region to an image of the size that is wanted: resized, colored, turned and written. */
#ifndef PACELINE_RENDER_H
#define PACELINE_RENDER_H

#include "paceline.h"
#include "taps.h"
#include "turn.h"

/* How a component is read. */
typedef struct {
  pl_axis down, across;
} pl_axes;

/* What is made, and in which direction it is written. */
typedef struct {
  int size, channels;
  pl_turn turn;
} pl_output;

/* Make `out` [channels, size, size] of 3 planes YCbCr, or of 1 of gray, which is repeated for 3 channels. The planes
 * have all samples that the axes need; `scratch` gives memory, and keeps what it has for planes. */
pl_status pl_render(const pl_plane planes[3], const pl_axes axes[3], int num_components, pl_output output,
                    pl_scratch *scratch, uint8_t *out);

#endif
