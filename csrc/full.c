/* Decodes a whole image to pixels, upright: what libjpeg-turbo and Pillow make of the file, bit for bit. */
#include <stdbool.h>
#include <string.h>

#include "paceline.h"
#include "upsample.h"

#define STRIP 16      /* rows made before they are turned: then pixels of a cache line are written together */
#define ROW_SLACK 64

/* How a component gets to full size: libjpeg's choice (jinit_upsampler of jdsample.c). */
typedef enum { AS_IT_IS, BLEND, WIDEN, WIDEN_BLENDED, REPEAT } upsampling;

typedef struct {
  const pl_record *record;
  const pl_row_functions *rows;
  pl_plane planes[3];
  upsampling how[3];
  uint8_t *upsampled[3]; /* a row each */
  uint16_t *sums;
  uint8_t *rgb;   /* a row */
  uint8_t *strip; /* rows as they are stored, where they must be turned */
  int channels;
} image;

static const pl_row_functions *choose_rows(void) {
#if defined(__x86_64__)
  if (pl_isa_now() == PL_AVX2) return &pl_rows_avx2;
#endif
  return &pl_rows_scalar;
}

static upsampling choose_upsampling(const pl_record *record, int component, int width) {
  int across = record->hmax / record->hs[component], down = record->vmax / record->vs[component];
  if (across == 1 && down == 1) return AS_IT_IS;
  if (across == 1 && down == 2) return BLEND;
  if (across == 2 && down == 1 && width > 2) return WIDEN;
  if (across == 2 && down == 2 && width > 2) return WIDEN_BLENDED;
  return REPEAT;
}

static bool reserve_rows(image *i, pl_scratch *scratch) {
  size_t width = ((size_t)i->record->width + 8 + ROW_SLACK + 63) / 64 * 64, pixels = width * (size_t)i->channels;
  uint8_t *memory = pl_reserve(&scratch->rows, width * (3 + 2 + 3) + pixels * STRIP);
  if (memory == NULL) return false;
  for (int c = 0; c < 3; c++) i->upsampled[c] = memory + (size_t)c * width;
  i->sums = (uint16_t *)(void *)(memory + 3 * width);
  i->rgb = memory + 5 * width;
  i->strip = memory + 8 * width;
  return true;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

static const uint8_t *row_of(const pl_plane *plane, int y) {
  int last = plane->height - 1;
  return plane->data + (ptrdiff_t)(y < 0 ? 0 : y > last ? last : y) * plane->stride;
}

static void repeat(const image *i, int component, int y, uint8_t *out) {
  int across = i->record->hmax / i->record->hs[component], down = i->record->vmax / i->record->vs[component];
  const uint8_t *row = row_of(&i->planes[component], y / down);
  for (int x = 0; x < i->record->width; x++) out[x] = row[x / across];
}

/* Return row `y` of a component at full size. */
static const uint8_t *full_row(const image *i, int component, int y) {
  const pl_plane *plane = &i->planes[component];
  size_t n = (size_t)plane->width;
  uint8_t *out = i->upsampled[component];
  const uint8_t *near = row_of(plane, y / 2), *far = row_of(plane, y % 2 == 0 ? y / 2 - 1 : y / 2 + 1);
  switch (i->how[component]) {
    case AS_IT_IS: return row_of(plane, y);
    case BLEND: i->rows->blend(near, far, n, y % 2 == 0 ? 1 : 2, out); break;
    case WIDEN: i->rows->widen(row_of(plane, y), n, out); break;
    case WIDEN_BLENDED: i->rows->widen_blended(near, far, n, i->sums, out); break;
    case REPEAT: repeat(i, component, y, out); break;
  }
  return out;
}

/* Write the pixels of stored row `y`. */
static void write_row(const image *i, int y, uint8_t *out) {
  size_t width = (size_t)i->record->width;
  const uint8_t *luma = full_row(i, 0, y);
  if (i->record->components == 1 && i->channels == 1) {
    memcpy(out, luma, width);
  } else if (i->record->components == 1) {
    for (size_t x = 0; x < width; x++) out[3 * x] = out[3 * x + 1] = out[3 * x + 2] = luma[x];
  } else if (i->channels == 3) {
    i->rows->to_rgb(luma, full_row(i, 1, y), full_row(i, 2, y), width, out);
  } else {
    i->rows->to_rgb(luma, full_row(i, 1, y), full_row(i, 2, y), width, i->rgb);
    i->rows->to_grey(i->rgb, width, out);
  }
}

/* ---- orientation ------------------------------------------------------------------------------------------------- */

/* Where stored pixel (x, y) goes: to out + start + x * across + y * down. */
typedef struct {
  ptrdiff_t start, across, down;
} placing;

/* EXIF orientations 5..8 exchange rows and columns; of the stored image's columns 2, 3, 7, 8 turn the order around,
 * of its rows 3, 4, 6, 7. */
static placing placing_of(const pl_record *record, int channels) {
  int o = record->orientation;
  ptrdiff_t pixel = channels, width = record->width, height = record->height;
  placing p = {.start = 0, .across = pixel, .down = width * pixel};
  if (o >= 5) p = (placing){.start = 0, .across = height * pixel, .down = pixel};
  if (o == 2 || o == 3 || o == 7 || o == 8) {
    p.start += (width - 1) * p.across;
    p.across = -p.across;
  }
  if (o == 3 || o == 4 || o == 6 || o == 7) {
    p.start += (height - 1) * p.down;
    p.down = -p.down;
  }
  return p;
}

static void place_pixel(const uint8_t *from, uint8_t *to, int channels) {
  to[0] = from[0];
  if (channels == 1) return;
  to[1] = from[1];
  to[2] = from[2];
}

static void write_turned(const image *i, uint8_t *out) {
  int width = i->record->width, height = i->record->height, channels = i->channels;
  placing p = placing_of(i->record, channels);
  ptrdiff_t row_bytes = (ptrdiff_t)width * channels;
  for (int top = 0; top < height; top += STRIP) {
    int num_rows = height - top < STRIP ? height - top : STRIP;
    for (int y = 0; y < num_rows; y++) write_row(i, top + y, i->strip + y * row_bytes);
    for (int x = 0; x < width; x++) {
      uint8_t *to = out + p.start + x * p.across + top * p.down;
      for (int y = 0; y < num_rows; y++) {
        place_pixel(i->strip + y * row_bytes + (ptrdiff_t)x * channels, to + y * p.down, channels);
      }
    }
  }
}

pl_status pl_decode_full(const pl_record *record, int channels, pl_scratch *scratch, uint8_t *out) {
  image i = {.record = record, .rows = choose_rows(), .channels = channels};
  const pl_region whole = {0, 0, record->height, record->width, {1, 1, 1}};
  pl_status status = pl_decode_planes(record, whole, PL_ALL, scratch, i.planes);
  if (status != PL_OK) return status;
  if (!reserve_rows(&i, scratch)) return PL_NO_MEMORY;
  for (int c = 0; c < record->components; c++) i.how[c] = choose_upsampling(record, c, i.planes[c].width);
  if (record->orientation != 1) {
    write_turned(&i, out);
    return PL_OK;
  }
  size_t row_bytes = (size_t)record->width * (size_t)channels;
  for (int y = 0; y < record->height; y++) write_row(&i, y, out + (size_t)y * row_bytes);
  return PL_OK;
}
