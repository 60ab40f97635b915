/* Reading the marker segments of a JPEG file (ITU T.81, annex B), strictly: what libjpeg would warn about, or Pillow
 * and libjpeg might read differently, is refused with a reason. Entropy-coded data is not read here. */
#ifndef PACELINE_JPEG_H
#define PACELINE_JPEG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PL_MAX_TABLE_BYTES (16 + 256)

/* Names of markers, the byte behind 0xff (T.81, table B.1). */
enum {
  PL_SOF0 = 0xc0,
  PL_SOF1 = 0xc1,
  PL_SOF2 = 0xc2,
  PL_DHT = 0xc4,
  PL_RST0 = 0xd0,
  PL_SOI = 0xd8,
  PL_EOI = 0xd9,
  PL_SOS = 0xda,
  PL_DQT = 0xdb,
  PL_DRI = 0xdd,
  PL_APP0 = 0xe0,
  PL_APP1 = 0xe1,
  PL_APP14 = 0xee,
  PL_COM = 0xfe
};

typedef struct {
  int id, h, v, quant; /* quant: which of the four tables */
} pl_component;

/* A scan's header. */
typedef struct {
  int num_components;
  int component[3]; /* index in the frame, ascending */
  int dc_table[3], ac_table[3];
  int first, last;  /* of the coefficients in zigzag order */
  int high, low;    /* bits of precision: before the scan (0: its first) and after it */
} pl_scan;

typedef struct {
  const uint8_t *file;
  size_t size, at; /* `at`: of what is read next */
  bool has_frame, is_progressive;
  int width, height, num_components;
  pl_component components[3];
  bool has_quant[4];
  uint16_t quant[4][64]; /* natural order */
  bool has_dc[4], has_ac[4];
  uint8_t dc[4][PL_MAX_TABLE_BYTES], ac[4][PL_MAX_TABLE_BYTES]; /* 16 counts, then values */
  int restart_interval;                                        /* in MCUs; 0: none */
  bool has_jfif, has_adobe;
  int adobe_transform;
  int orientation; /* EXIF's, 1..8; 0 while the header is being read */
  const uint8_t *exif; /* meanwhile: its block, or its blocks as Pillow joins them */
  size_t exif_bytes;
  uint8_t *joined_exif; /* malloc'd, where there are several */
} pl_jpeg;

extern const char pl_cut_off[]; /* the reason where more bytes are needed */

/* Read the markers up to the first scan's data. Return NULL, or what is wrong, in words that "it is" may precede. */
const char *pl_jpeg_open(const uint8_t *file, size_t size, pl_jpeg *jpeg, pl_scan *scan);

/* Read the marker between restart intervals `number` and `number` + 1. */
const char *pl_jpeg_restart(pl_jpeg *jpeg, int64_t number);

/* Copy the entropy-coded bytes from here to the next marker to `out`, without stuffing, and return their number. `out`
 * has room for what is left of the file. */
size_t pl_jpeg_unstuff(pl_jpeg *jpeg, uint8_t *out);

/* Copy the entropy-coded bytes that `from` begins with to `out`, without stuffing: return their number, and in `*taken`
 * how many they were. */
size_t pl_unstuff(const uint8_t *from, size_t size, uint8_t *out, size_t *taken);

/* Read on behind a scan's data: set `*is_end` at the end of the image, else read the next scan's header. */
const char *pl_jpeg_next_scan(pl_jpeg *jpeg, pl_scan *scan, bool *is_end);

/* Return the orientation, 1..8, of the EXIF block; 1 where there is none or it makes no sense (exif.c). */
int pl_exif_orientation(const uint8_t *exif, size_t size);

#endif
