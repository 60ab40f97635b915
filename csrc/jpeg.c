/* Reads marker segments; those that have no meaning for pixels are passed over, those that may have one are refused. */
#include "jpeg.h"

#include <stdlib.h>
#include <string.h>

#include "block.h"
#include "bytes.h"
#include "paceline.h"
#include "record.h"

#define MAX_SIDE 65500 /* libjpeg's JPEG_MAX_DIMENSION */

/* The payload of a marker segment. */
typedef struct {
  const uint8_t *bytes;
  size_t size;
} segment;

const char pl_cut_off[] = "cut off";

/* ---- segments ---------------------------------------------------------------------------------------------------- */

static const char *read_quantisation(pl_jpeg *jpeg, segment s) {
  while (s.size > 0) {
    int precision = s.bytes[0] >> 4, index = s.bytes[0] & 15;
    size_t width = precision == 0 ? 1 : 2;
    if (precision > 1 || index > 3 || s.size < 1 + 64 * width) return "damaged (a quantization table)";
    for (size_t i = 0; i < 64; i++) {
      const uint8_t *factor = s.bytes + 1 + i * width;
      jpeg->quant[index][pl_natural_order[i]] = (uint16_t)(width == 1 ? factor[0] : pl_big16(factor));
    }
    jpeg->has_quant[index] = true;
    s.bytes += 1 + 64 * width;
    s.size -= 1 + 64 * width;
  }
  return NULL;
}

static const char *read_huffman(pl_jpeg *jpeg, segment s) {
  while (s.size > 0) {
    int is_ac = s.bytes[0] >> 4, index = s.bytes[0] & 15;
    size_t extent = pl_table_extent(s.bytes + 1, s.size - 1);
    if (is_ac > 1 || index > 3 || extent == 0) return "damaged (a Huffman table)";
    memcpy(is_ac ? jpeg->ac[index] : jpeg->dc[index], s.bytes + 1, extent);
    (is_ac ? jpeg->has_ac : jpeg->has_dc)[index] = true;
    s.bytes += 1 + extent;
    s.size -= 1 + extent;
  }
  return NULL;
}

static const char *read_frame(pl_jpeg *jpeg, segment s, uint8_t marker) {
  if (jpeg->has_frame) return "damaged (it has two frame headers)";
  if (s.size < 6) return "damaged (its frame header)";
  if (s.bytes[0] != 8) return "of more than 8 bits a sample";
  jpeg->has_frame = true;
  jpeg->is_progressive = marker == PL_SOF2;
  jpeg->height = (int)pl_big16(s.bytes + 1);
  jpeg->width = (int)pl_big16(s.bytes + 3);
  jpeg->num_components = s.bytes[5];
  if (jpeg->num_components == 4) return "colored as CMYK";
  if (jpeg->num_components != 1 && jpeg->num_components != 3) return "neither gray nor of three components";
  if (s.size != 6 + 3 * (size_t)jpeg->num_components) return "damaged (its frame header)";
  if (jpeg->width == 0 || jpeg->height == 0) return "of a size that its header does not say";
  if (jpeg->width > MAX_SIDE || jpeg->height > MAX_SIDE) return "too large";
  if ((int64_t)jpeg->width * jpeg->height > PL_MAX_PIXELS) return "too large";
  for (int c = 0; c < jpeg->num_components; c++) {
    const uint8_t *of = s.bytes + 6 + 3 * c;
    jpeg->components[c] = (pl_component){.id = of[0], .h = of[1] >> 4, .v = of[1] & 15, .quant = of[2]};
    if (of[2] > 3) return "damaged (its frame header)";
    for (int before = 0; before < c; before++) {
      if (jpeg->components[before].id == of[0]) return "damaged (two components of one name)";
    }
  }
  return NULL;
}

/* Keep an EXIF block as Pillow does: the first whole, of further ones what follows their six letters; of those behind
 * the first scan nothing. */
static const char *read_exif(pl_jpeg *jpeg, segment s) {
  if (jpeg->orientation != 0 || s.size < 6 || memcmp(s.bytes, "Exif\0\0", 6) != 0) return NULL;
  if (jpeg->exif == NULL) {
    jpeg->exif = s.bytes;
    jpeg->exif_bytes = s.size;
    return NULL;
  }
  uint8_t *joined = realloc(jpeg->joined_exif, jpeg->exif_bytes + s.size);
  if (joined == NULL) return "too large for this memory";
  if (jpeg->joined_exif == NULL) memcpy(joined, jpeg->exif, jpeg->exif_bytes);
  memcpy(joined + jpeg->exif_bytes, s.bytes + 6, s.size - 6);
  jpeg->exif = jpeg->joined_exif = joined;
  jpeg->exif_bytes += s.size - 6;
  return NULL;
}

static int component_of(const pl_jpeg *jpeg, int id) {
  for (int c = 0; c < jpeg->num_components; c++) {
    if (jpeg->components[c].id == id) return c;
  }
  return -1;
}

static const char *read_scan_header(const pl_jpeg *jpeg, segment s, pl_scan *scan) {
  static const char damaged[] = "damaged (a scan header)";
  if (!jpeg->has_frame) return "damaged (a scan before the frame header)";
  if (s.size < 1) return damaged;
  memset(scan, 0, sizeof *scan);
  scan->num_components = s.bytes[0];
  if (scan->num_components < 1 || scan->num_components > jpeg->num_components) return damaged;
  if (s.size != 4 + 2 * (size_t)scan->num_components) return damaged;
  for (int i = 0; i < scan->num_components; i++) {
    const uint8_t *of = s.bytes + 1 + 2 * i;
    scan->component[i] = component_of(jpeg, of[0]);
    scan->dc_table[i] = of[1] >> 4;
    scan->ac_table[i] = of[1] & 15;
    if (scan->component[i] < 0 || scan->dc_table[i] > 3 || scan->ac_table[i] > 3) return damaged;
    if (i > 0 && scan->component[i] <= scan->component[i - 1]) return "of components in another order than its frame's";
  }
  const uint8_t *rest = s.bytes + 1 + 2 * scan->num_components;
  scan->first = rest[0];
  scan->last = rest[1];
  scan->high = rest[2] >> 4;
  scan->low = rest[2] & 15;
  return scan->first > scan->last || scan->last > 63 ? damaged : NULL;
}

/* Note which application wrote it, as far as colors follow from that (libjpeg's examine_app0 and examine_app14). */
static void read_colour_marks(pl_jpeg *jpeg, segment s, uint8_t marker) {
  if (marker == PL_APP0 && s.size >= 14 && memcmp(s.bytes, "JFIF\0", 5) == 0) jpeg->has_jfif = true;
  if (marker == PL_APP14 && s.size >= 12 && memcmp(s.bytes, "Adobe", 5) == 0) {
    jpeg->has_adobe = true;
    jpeg->adobe_transform = s.bytes[11];
  }
}

/* ---- markers ----------------------------------------------------------------------------------------------------- */

static const char *refuse(uint8_t marker) {
  switch (marker) {
    case 0xc3: return "lossless";
    case 0xc5: case 0xc6: case 0xc7: case 0xde: case 0xdf: return "hierarchical";
    case 0xc9: case 0xca: case 0xcb: case 0xcc: case 0xcd: case 0xce: case 0xcf: return "arithmetic-coded";
    case 0xdc: return "of a size that its header does not say";
    default: return "damaged (an unknown marker)";
  }
}

static const char *read_segment(pl_jpeg *jpeg, uint8_t marker, segment s) {
  switch (marker) {
    case PL_SOF0: case PL_SOF1: case PL_SOF2: return read_frame(jpeg, s, marker);
    case PL_DHT: return read_huffman(jpeg, s);
    case PL_DQT: return read_quantisation(jpeg, s);
    case PL_DRI:
      if (s.size != 2) return "damaged (its restart interval)";
      jpeg->restart_interval = (int)pl_big16(s.bytes);
      return NULL;
    case PL_APP1: return read_exif(jpeg, s);
    default:
      if ((marker < PL_APP0 || marker > PL_APP0 + 15) && marker != PL_COM) return refuse(marker);
      read_colour_marks(jpeg, s, marker);
      return NULL;
  }
}

/* Read the name of a marker, which only copies of 0xff may precede. */
static const char *read_marker(pl_jpeg *jpeg, uint8_t *marker) {
  if (jpeg->at >= jpeg->size) return pl_cut_off;
  if (jpeg->file[jpeg->at] != 0xff) return "damaged (bytes between its markers)";
  while (jpeg->at < jpeg->size && jpeg->file[jpeg->at] == 0xff) jpeg->at++;
  if (jpeg->at >= jpeg->size) return pl_cut_off;
  *marker = jpeg->file[jpeg->at++];
  return NULL;
}

/* Markers that stand alone, but for the end of the image, have no place between segments. */
static bool stands_alone(uint8_t marker) { return marker < 0xc0 || (marker >= PL_RST0 && marker <= PL_SOI); }

const char *pl_jpeg_next_scan(pl_jpeg *jpeg, pl_scan *scan, bool *is_end) {
  *is_end = false;
  for (;;) {
    uint8_t marker = 0;
    const char *reason = read_marker(jpeg, &marker);
    if (reason != NULL) return reason;
    if (marker == PL_EOI) {
      *is_end = true;
      return NULL;
    }
    if (stands_alone(marker)) return "damaged (a marker out of place)";
    if (jpeg->size - jpeg->at < 2) return pl_cut_off;
    size_t length = pl_big16(jpeg->file + jpeg->at);
    if (length < 2) return "damaged (a segment without length)";
    if (length > jpeg->size - jpeg->at) return pl_cut_off;
    segment s = {.bytes = jpeg->file + jpeg->at + 2, .size = length - 2};
    jpeg->at += length;
    reason = marker == PL_SOS ? read_scan_header(jpeg, s, scan) : read_segment(jpeg, marker, s);
    if (reason != NULL || marker == PL_SOS) return reason;
  }
}

/* ---- the whole header -------------------------------------------------------------------------------------------- */

/* Return whether libjpeg takes three components for YCbCr (default_decompress_parms of jdapimin.c). */
static bool is_ycc(const pl_jpeg *jpeg) {
  if (jpeg->has_jfif) return true;
  if (jpeg->has_adobe) return jpeg->adobe_transform == 1;
  const pl_component *of = jpeg->components;
  return !(of[0].id == 'R' && of[1].id == 'G' && of[2].id == 'B');
}

const char *pl_jpeg_open(const uint8_t *file, size_t size, pl_jpeg *jpeg, pl_scan *scan) {
  memset(jpeg, 0, sizeof *jpeg);
  jpeg->file = file;
  jpeg->size = size;
  jpeg->at = 2;
  if (size < 3 || file[0] != 0xff || file[1] != PL_SOI || file[2] != 0xff) return "not a JPEG file";
  bool is_end = false;
  const char *reason = pl_jpeg_next_scan(jpeg, scan, &is_end);
  jpeg->orientation = pl_exif_orientation(jpeg->exif, jpeg->exif_bytes);
  free(jpeg->joined_exif);
  jpeg->exif = jpeg->joined_exif = NULL;
  if (reason != NULL) return reason;
  if (is_end) return "damaged (it has no image)";
  if (jpeg->num_components == 3 && !is_ycc(jpeg)) return "colored as RGB, or in a way that is not known";
  return NULL;
}

/* ---- entropy-coded data ------------------------------------------------------------------------------------------ */

const char *pl_jpeg_restart(pl_jpeg *jpeg, int64_t number) {
  uint8_t marker = 0;
  const char *reason = read_marker(jpeg, &marker);
  if (reason != NULL) return reason;
  return marker == PL_RST0 + number % 8 ? NULL : "damaged (a restart marker)";
}

size_t pl_unstuff(const uint8_t *from, size_t size, uint8_t *out, size_t *taken) {
  size_t num_bytes = 0, at = 0;
  while (at < size) {
    const uint8_t *mark = memchr(from + at, 0xff, size - at);
    size_t plain = mark == NULL ? size - at : (size_t)(mark - from) - at;
    memcpy(out + num_bytes, from + at, plain);
    num_bytes += plain;
    at += plain;
    if (size - at < 2 || mark[1] != 0) break;
    out[num_bytes++] = 0xff;
    at += 2;
  }
  *taken = at;
  return num_bytes;
}

size_t pl_jpeg_unstuff(pl_jpeg *jpeg, uint8_t *out) {
  size_t taken = 0;
  size_t num_bytes = pl_unstuff(jpeg->file + jpeg->at, jpeg->size - jpeg->at, out, &taken);
  jpeg->at += taken;
  return num_bytes;
}
