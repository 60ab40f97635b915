/* From a record to a training image: which pixels a box needs, in the stored image's coordinates and each component's.
 *
 * Chroma samples are centered among the pixels they stand for (JFIF, ITU-T T.871, section 10.1), so a box scales to a
 * component's samples plainly. */
#include "paceline.h"
#include "render.h"
#include "taps.h"
#include "turn.h"

#define SLACK 1e-3 /* pixels that rounding may put a box outside its image */

/* Pixels [top, bottom) x [left, right) of the stored image. */
typedef struct {
  int top, left, bottom, right;
} pl_region;

/* Comparisons are written so that a NaN fails them. */
static int fits(double start, double length, int extent) {
  return start >= -SLACK && length > 0.0 && start + length <= extent + SLACK;
}

/* Return the box in the stored image's coordinates. */
static pl_box stored_box(pl_box box, pl_turn turn, int height, int width) {
  if (turn.transposed) box = (pl_box){box.left, box.top, box.width, box.height};
  if (turn.reverse_rows) box.top = height - box.top - box.height;
  if (turn.reverse_columns) box.left = width - box.left - box.width;
  return box;
}

static int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

/* Return how a component with `sampling` of `most` samples a pixel reads [start, start + length) of `extent` pixels. */
static pl_axis axis_of(double start, double length, int extent, int sampling, int most, int inside) {
  const double factor = (double)sampling / most;
  int low = 0, high = extent;
  if (inside) { /* the box's whole pixels, and at least one */
    low = clamp((int)(start + 0.5), 0, extent - 1);
    high = clamp((int)(start + length + 0.5), low + 1, extent);
  }
  return (pl_axis){start * factor, length * factor, low * sampling / most, (high * sampling + most - 1) / most};
}

static pl_axes axes_of(const pl_record *record, int component, pl_box box, int inside) {
  return (pl_axes){
      .down = axis_of(box.top, box.height, record->height, record->vs[component], record->vmax, inside),
      .across = axis_of(box.left, box.width, record->width, record->hs[component], record->hmax, inside)};
}

static int smaller(int a, int b) { return a < b ? a : b; }

static int larger(int a, int b) { return a > b ? a : b; }

/* Widen [low, high) by the pixels that samples [first, last) stand for. */
static void widen(const pl_axis *axis, int size, int sampling, int most, int extent, int *low, int *high) {
  int first, last;
  pl_axis_extent(axis, size, &first, &last);
  *low = smaller(*low, first * most / sampling);
  *high = larger(*high, smaller((last * most + sampling - 1) / sampling, extent));
}

static pl_region region_of(const pl_record *record, const pl_axes axes[3], int num_components, int size) {
  pl_region region = {record->height, record->width, 0, 0};
  for (int i = 0; i < num_components; i++) {
    widen(&axes[i].down, size, record->vs[i], record->vmax, record->height, &region.top, &region.bottom);
    widen(&axes[i].across, size, record->hs[i], record->hmax, record->width, &region.left, &region.right);
  }
  return region;
}

pl_status pl_decode_crop(const pl_record *record, pl_box box, int inside, int flip, int size, int channels,
                         pl_stage stage, pl_scratch *scratch, uint8_t *out) {
  const pl_turn upright = pl_turn_of(record->orientation, 0);
  if (size < 1 || size > PL_MAX_OUTPUT || (channels != 1 && channels != 3)) return PL_BAD_REGION;
  box = stored_box(box, upright, record->height, record->width);
  if (!fits(box.top, box.height, record->height) || !fits(box.left, box.width, record->width)) return PL_BAD_REGION;

  const int num_components = channels == 3 ? record->components : 1;
  pl_axes axes[3];
  for (int i = 0; i < num_components; i++) axes[i] = axes_of(record, i, box, inside);
  const pl_region region = region_of(record, axes, num_components, size);
  pl_plane planes[3];
  pl_status status = pl_decode_planes(record, region.top, region.left, region.bottom, region.right, stage, scratch,
                                      planes);
  if (status != PL_OK || stage != PL_ALL) return status;

  return pl_render(planes, axes, num_components, (pl_output){size, channels, pl_turn_of(record->orientation, flip)},
                   scratch, out);
}
