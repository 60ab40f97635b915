/* What a batch is asked for: the arguments of Pool's methods, checked, with all that is small copied and all memory
 * that the threads will use held. */
#include "module_batch.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory that is held --------------------------------------------------------------------------------------- */

void pl_release(pl_held *held) {
  pl_held all = *held; /* whoever comes meanwhile, by way of an object's own code, finds nothing left */
  *held = (pl_held){NULL, 0};
  for (Py_ssize_t i = 0; i < all.num_views; i++) PyBuffer_Release(&all.views[i]);
  PyMem_Free(all.views);
}

/* Make room for all views. */
static bool make_room(pl_held *held, Py_ssize_t num_views) {
  held->views = PyMem_Calloc((size_t)num_views, sizeof(Py_buffer));
  if (held->views == NULL) PyErr_NoMemory();
  return held->views != NULL;
}

/* Hold memory as `pl_borrow` borrows it. Return NULL with an exception set where that cannot be. */
static const Py_buffer *hold(pl_held *held, PyObject *object, const char *name, char kind, Py_ssize_t num_items,
                             int is_written) {
  Py_buffer *view = &held->views[held->num_views];
  if (pl_borrow(object, name, kind, num_items, is_written, view)) return NULL;
  held->num_views++;
  return view;
}

/* Hold each object of a tuple. */
static const Py_buffer *hold_all(pl_held *held, PyObject *tuple, const char *name) {
  const Py_buffer *first = &held->views[held->num_views];
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++)
    if (hold(held, PyTuple_GetItem(tuple, i), name, '*', -1, 0) == NULL) return NULL;
  return first;
}

/* ---- columns --------------------------------------------------------------------------------------------------- */

/* Where a part of a buffer is, per image: copies. */
typedef struct {
  int32_t *buffer_of;
  uint64_t *offsets, *lengths; /* a length of 0: nowhere */
} parts;

static void free_parts(parts *where) {
  PyMem_Free(where->buffer_of);
  PyMem_Free(where->offsets);
  PyMem_Free(where->lengths);
}

/* Set `*bytes` and `*num_bytes` to a part of one of `num_buffers` buffers; return false where it is not inside. */
static bool find_part(const parts *where, Py_ssize_t i, const Py_buffer *buffers, Py_ssize_t num_buffers,
                      const char *name, const char *buffer_name, const uint8_t **bytes, size_t *num_bytes) {
  if (where->lengths[i] == 0) return true;
  int32_t buffer = where->buffer_of[i];
  uint64_t size = buffer >= 0 && buffer < num_buffers ? (uint64_t)buffers[buffer].len : 0;
  if (where->lengths[i] > size || where->offsets[i] > size - where->lengths[i]) {
    PyErr_Format(PyExc_ValueError, "%s %zd is at %llu, %llu bytes, of %s %d, which has %llu", name, i,
                 (unsigned long long)where->offsets[i], (unsigned long long)where->lengths[i], buffer_name, (int)buffer,
                 (unsigned long long)size);
    return false;
  }
  *bytes = (const uint8_t *)buffers[buffer].buf + where->offsets[i];
  *num_bytes = (size_t)where->lengths[i];
  return true;
}

static bool set_crops(PyObject *boxes, PyObject *flips, Py_ssize_t n, pl_image *images) {
  double *box = pl_copied(boxes, "boxes", 'd', 4 * n, NULL);
  uint8_t *flip = box != NULL ? pl_copied(flips, "flips", 'u', n, NULL) : NULL;
  for (Py_ssize_t i = 0; flip != NULL && i < n; i++) {
    const double *of = &box[4 * i];
    images[i].box = (pl_box){.top = of[0], .left = of[1], .height = of[2], .width = of[3]};
    images[i].flip = flip[i] != 0;
  }
  bool is_set = flip != NULL;
  PyMem_Free(box);
  PyMem_Free(flip);
  return is_set;
}

/* Hold an array that is written. */
static void *hold_written(pl_held *held, PyObject *object, const char *name, char kind, Py_ssize_t num_items) {
  const Py_buffer *view = hold(held, object, name, kind, num_items, 1);
  return view != NULL ? view->buf : NULL;
}

static bool hold_out(pl_held *held, PyObject *out, Py_ssize_t n, pl_batch *batch) {
  Py_ssize_t image_bytes = (Py_ssize_t)batch->crop.channels * batch->crop.size * batch->crop.size;
  if (n > PY_SSIZE_T_MAX / image_bytes) {
    PyErr_SetString(PyExc_ValueError, "there are too many images");
    return false;
  }
  batch->out = hold_written(held, out, "out", 'u', n * image_bytes);
  return batch->out != NULL;
}

static pl_image *new_images(Py_ssize_t n) {
  pl_image *images = calloc(n > 0 ? (size_t)n : 1, sizeof(pl_image));
  if (images == NULL) PyErr_NoMemory();
  return images;
}

static pl_image *kept_if(bool is_good, pl_image *images) {
  if (is_good) return images;
  free(images);
  return NULL;
}

/* ---- records --------------------------------------------------------------------------------------------------- */

static bool set_records(const parts *where, Py_ssize_t n, const Py_buffer *shards, Py_ssize_t num_shards,
                        pl_image *images) {
  for (Py_ssize_t i = 0; i < n; i++) {
    size_t num_bytes = 0;
    if (!find_part(where, i, shards, num_shards, "image", "shard", &images[i].file.bytes, &num_bytes)) return false;
    images[i].file.num_bytes = num_bytes;
  }
  return true;
}

pl_image *pl_read_records(PyObject *args, PyObject *named, pl_held *held, Py_ssize_t *n, pl_batch *batch) {
  static char *names[] = {"shards", "shard_of", "offsets",  "lengths", "boxes",  "flips", "inside",
                          "size",   "channels", "out",      "status",  "stage",  NULL};
  PyObject *shards, *shard_of, *offsets, *lengths, *boxes, *flips, *out, *status;
  pl_crop *crop = &batch->crop;
  int stage = PL_ALL;
  if (!PyArg_ParseTupleAndKeywords(args, named, "OOOOOOpiiOO|i:submit", names, &shards, &shard_of, &offsets, &lengths,
                                   &boxes, &flips, &crop->inside, &crop->size, &crop->channels, &out, &status, &stage))
    return NULL;
  if (pl_check_output(crop->size, crop->channels, stage)) return NULL;
  crop->stage = (pl_stage)stage;
  batch->kind = PL_RECORDS;
  PyObject *all = PySequence_Tuple(shards);
  if (all == NULL) return NULL;
  parts where = {0};
  pl_image *images = NULL;
  const Py_buffer *views = NULL;
  bool is_good = (where.buffer_of = pl_copied(shard_of, "shard_of", 'i', -1, n)) != NULL &&
                 (where.offsets = pl_copied(offsets, "offsets", 'L', *n, NULL)) != NULL &&
                 (where.lengths = pl_copied(lengths, "lengths", 'L', *n, NULL)) != NULL &&
                 (images = new_images(*n)) != NULL && set_crops(boxes, flips, *n, images) &&
                 make_room(held, PyTuple_Size(all) + 2) && (views = hold_all(held, all, "a shard")) != NULL &&
                 hold_out(held, out, *n, batch) &&
                 (batch->status = hold_written(held, status, "status", 'i', *n)) != NULL &&
                 set_records(&where, *n, views, PyTuple_Size(all), images);
  free_parts(&where);
  Py_DECREF(all);
  return kept_if(is_good, images);
}

/* ---- files ----------------------------------------------------------------------------------------------------- */

/* Hold a file: bytes are a path, None is no image, other memory is the file itself. */
static bool set_file(pl_held *held, PyObject *object, pl_file *file) {
  static const uint8_t nothing[1] = {0};
  if (object == Py_None) {
    *file = (pl_file){0};
    return true;
  }
  const Py_buffer *view = hold(held, object, "a file", '*', -1, 0);
  if (view == NULL) return false;
  if (!PyBytes_Check(object)) {
    file->bytes = view->len > 0 ? view->buf : nothing;
    file->num_bytes = (uint64_t)view->len;
    file->offset = 0;
    return true;
  }
  file->path = view->buf; /* a zero follows the content of bytes */
  if (strlen(file->path) == (size_t)view->len) return true;
  PyErr_SetString(PyExc_ValueError, "a path has a zero byte");
  return false;
}

static bool set_files(pl_held *held, PyObject *files, PyObject *offsets, PyObject *lengths, pl_image *images) {
  Py_ssize_t n = PyTuple_Size(files);
  parts where = {.offsets = pl_copied(offsets, "offsets", 'L', n, NULL)};
  if (where.offsets != NULL) where.lengths = pl_copied(lengths, "lengths", 'L', n, NULL);
  bool is_good = where.lengths != NULL;
  for (Py_ssize_t i = 0; is_good && i < n; i++) {
    images[i].file.offset = where.offsets[i];
    images[i].file.num_bytes = where.lengths[i];
    is_good = set_file(held, PyTuple_GetItem(files, i), &images[i].file);
  }
  free_parts(&where);
  return is_good;
}

static bool set_entries(pl_held *held, PyObject *buffers, PyObject *index_of, PyObject *offsets, PyObject *lengths,
                        Py_ssize_t n, pl_image *images) {
  parts where = {0};
  const Py_buffer *views = NULL;
  bool is_good = (where.buffer_of = pl_copied(index_of, "index_of", 'i', n, NULL)) != NULL &&
                 (where.offsets = pl_copied(offsets, "index_offsets", 'L', n, NULL)) != NULL &&
                 (where.lengths = pl_copied(lengths, "index_lengths", 'L', n, NULL)) != NULL &&
                 (views = hold_all(held, buffers, "an index buffer")) != NULL;
  for (Py_ssize_t i = 0; is_good && i < n; i++) {
    pl_file *file = &images[i].file;
    is_good = find_part(&where, i, views, PyTuple_Size(buffers), "index", "index buffer", &file->entry,
                        &file->entry_bytes);
  }
  free_parts(&where);
  return is_good;
}

pl_image *pl_read_files(PyObject *args, PyObject *named, pl_held *held, Py_ssize_t *n, pl_batch *batch) {
  static char *names[] = {"files", "offsets", "lengths", "index_buffers", "index_of", "index_offsets", "index_lengths",
                          "boxes", "flips",   "inside",  "size",          "channels", "sizes",         "out",
                          "status", "stage",  NULL};
  PyObject *files, *offsets, *lengths, *buffers, *index_of, *index_offsets, *index_lengths, *boxes, *flips;
  PyObject *sizes, *out, *status;
  pl_crop *crop = &batch->crop;
  int stage = PL_ALL;
  if (!PyArg_ParseTupleAndKeywords(args, named, "OOOOOOOOOpiiOOO|i:submit_jpegs", names, &files, &offsets, &lengths,
                                   &buffers, &index_of, &index_offsets, &index_lengths, &boxes, &flips, &crop->inside,
                                   &crop->size, &crop->channels, &sizes, &out, &status, &stage))
    return NULL;
  if (pl_check_output(crop->size, crop->channels, stage)) return NULL;
  crop->stage = (pl_stage)stage;
  batch->kind = PL_FILES;
  PyObject *all = PySequence_Tuple(files), *all_buffers = all != NULL ? PySequence_Tuple(buffers) : NULL;
  pl_image *images = NULL;
  bool is_good = all_buffers != NULL;
  if (is_good) {
    *n = PyTuple_Size(all);
    is_good = (images = new_images(*n)) != NULL && make_room(held, *n + PyTuple_Size(all_buffers) + 3) &&
              set_files(held, all, offsets, lengths, images) &&
              set_entries(held, all_buffers, index_of, index_offsets, index_lengths, *n, images) &&
              set_crops(boxes, flips, *n, images) &&
              (batch->sizes = hold_written(held, sizes, "sizes", 'i', 2 * *n)) != NULL &&
              hold_out(held, out, *n, batch) &&
              (batch->status = hold_written(held, status, "status", 'i', *n)) != NULL;
  }
  Py_XDECREF(all);
  Py_XDECREF(all_buffers);
  return kept_if(is_good, images);
}

pl_image *pl_read_headers(PyObject *args, PyObject *named, pl_held *held, Py_ssize_t *n, pl_batch *batch) {
  static char *names[] = {"files", "offsets", "lengths", "sizes", "status", NULL};
  PyObject *files, *offsets, *lengths, *sizes, *status;
  if (!PyArg_ParseTupleAndKeywords(args, named, "OOOOO:measure", names, &files, &offsets, &lengths, &sizes, &status))
    return NULL;
  batch->kind = PL_HEADERS;
  PyObject *all = PySequence_Tuple(files);
  if (all == NULL) return NULL;
  *n = PyTuple_Size(all);
  pl_image *images = new_images(*n);
  bool is_good = images != NULL && make_room(held, *n + 2) && set_files(held, all, offsets, lengths, images) &&
                 (batch->sizes = hold_written(held, sizes, "sizes", 'i', 2 * *n)) != NULL &&
                 (batch->status = hold_written(held, status, "status", 'i', *n)) != NULL;
  Py_DECREF(all);
  return kept_if(is_good, images);
}
