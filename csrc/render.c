/* Planes become an image eight rows at a time, so that what is between the steps stays in the nearest cache.
 *
 * Each plane is resized straight to the output's size and they become colors there: no image of full size is made, and
 * chroma is enlarged or reduced once. */
#include "render.h"

#include "colour.h"
#include "resize.h"

typedef struct {
  pl_resize_rows *resize;
  pl_to_rgb *to_rgb;
  pl_to_grey *to_grey;
  pl_write_rows *write;
} pl_kernels;

/* What is made of a plane, and of which. Filters are shared where planes are alike. */
typedef struct {
  pl_axes axes;
  pl_taps down, across;
} pl_filter;

static pl_kernels kernels_now(void) {
#if defined(__x86_64__)
  if (pl_isa_now() == PL_AVX2) {
    return (pl_kernels){pl_resize_rows_avx2, pl_to_rgb_avx2, pl_to_grey_avx2, pl_write_rows_avx2};
  }
#endif
  return (pl_kernels){pl_resize_rows_scalar, pl_to_rgb_scalar, pl_to_grey_scalar, pl_write_rows_scalar};
}

static int smaller(int a, int b) { return a < b ? a : b; }

static int larger(int a, int b) { return a > b ? a : b; }

/* See to it that no filter reads what the plane does not have. */
static int within_plane(pl_axis *axis, int origin, int extent) {
  axis->low = larger(axis->low, origin);
  axis->high = smaller(axis->high, origin + extent);
  return axis->low < axis->high;
}

static int same_axis(const pl_axis *a, const pl_axis *b) {
  return a->start == b->start && a->length == b->length && a->low == b->low && a->high == b->high &&
         a->parts == b->parts;
}

static int same_axes(const pl_axes *a, const pl_axes *b) {
  return same_axis(&a->down, &b->down) && same_axis(&a->across, &b->across);
}

/* Make what every plane is resized by; those of equal sampling share their weights. */
static pl_status make_filters(const pl_plane planes[3], const pl_axes axes[3], int num_components, int size,
                              pl_scratch *scratch, pl_filter filters[3]) {
  size_t num_bytes = 0;
  for (int i = 0; i < num_components; i++) {
    filters[i].axes = axes[i];
    if (!within_plane(&filters[i].axes.down, planes[i].y0, planes[i].height)) return PL_BAD_REGION;
    if (!within_plane(&filters[i].axes.across, planes[i].x0, planes[i].width)) return PL_BAD_REGION;
    num_bytes += pl_taps_bytes(&filters[i].axes.down, size) + pl_taps_bytes(&filters[i].axes.across, size);
  }
  char *memory = pl_reserve(&scratch->taps, num_bytes);
  if (!memory) return PL_NO_MEMORY;
  for (int i = 0; i < num_components; i++) {
    pl_filter *filter = &filters[i];
    if (i > 0 && same_axes(&filter->axes, &filters[i - 1].axes) && planes[i].x0 == planes[i - 1].x0 &&
        planes[i].y0 == planes[i - 1].y0) {
      *filter = filters[i - 1];
      continue;
    }
    pl_taps_make(&filter->axes.down, size, planes[i].y0, 1, memory, &filter->down);
    memory += pl_taps_bytes(&filter->axes.down, size);
    pl_taps_make(&filter->axes.across, size, planes[i].x0, 2, memory, &filter->across);
    memory += pl_taps_bytes(&filter->axes.across, size);
  }
  return PL_OK;
}

/* Memory for eight rows of every component: as resized, and as they are written. */
typedef struct {
  int16_t *strip, *samples[3];
  uint8_t *colours[3];
} pl_rows;

static pl_status reserve_rows(const pl_filter filters[3], int num_components, int size, pl_scratch *scratch,
                              pl_rows *rows) {
  size_t strip_bytes = 0;
  for (int i = 0; i < num_components; i++) {
    const size_t needed = pl_strip_bytes(&filters[i].across);
    if (needed > strip_bytes) strip_bytes = needed;
  }
  const size_t samples_bytes = pl_columns_bytes(size), colours_bytes = pl_channel_bytes((size_t)size * PL_ROWS);
  rows->strip = pl_reserve(&scratch->rows, strip_bytes);
  char *memory = pl_reserve(&scratch->columns, 3 * (samples_bytes + colours_bytes));
  if (!rows->strip || !memory) return PL_NO_MEMORY;
  for (int i = 0; i < 3; i++, memory += samples_bytes) rows->samples[i] = (int16_t *)(void *)memory;
  for (int i = 0; i < 3; i++, memory += colours_bytes) rows->colours[i] = (uint8_t *)memory;
  return PL_OK;
}

/* Make all rows of the output, eight at a time. */
static void make_image(const pl_plane planes[3], const pl_filter filters[3], int num_components, const pl_rows *rows,
                       pl_output output, uint8_t *out) {
  const pl_kernels kernels = kernels_now();
  const size_t size = (size_t)output.size;
  const int16_t *const ycc[3] = {rows->samples[0], rows->samples[1], rows->samples[2]};
  for (int y = 0; y < output.size; y += PL_ROWS) {
    for (int i = 0; i < num_components; i++) {
      kernels.resize(&planes[i], &filters[i].down, &filters[i].across, y, rows->strip, rows->samples[i]);
    }
    if (num_components == 3) {
      kernels.to_rgb(ycc, size * PL_ROWS, rows->colours);
    } else {
      kernels.to_grey(ycc[0], size * PL_ROWS, rows->colours[0]);
    }
    for (int channel = 0; channel < output.channels; channel++) {
      const uint8_t *colours = rows->colours[num_components == 3 ? channel : 0];
      kernels.write(colours, output.size, y, output.turn, out + (size_t)channel * size * size);
    }
  }
}

pl_status pl_render(const pl_plane planes[3], const pl_axes axes[3], int num_components, pl_output output,
                    pl_scratch *scratch, uint8_t *out) {
  pl_filter filters[3];
  pl_rows rows;
  pl_status status = make_filters(planes, axes, num_components, output.size, scratch, filters);
  if (status == PL_OK) status = reserve_rows(filters, num_components, output.size, scratch, &rows);
  if (status == PL_OK) make_image(planes, filters, num_components, &rows, output, out);
  return status;
}
