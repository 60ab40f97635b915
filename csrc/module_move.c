/* `move` for Python: every index and offset is checked, and copied first, so that nobody can change it afterwards. */
#include "binding.h"

#include <stdbool.h>

typedef struct {
  int64_t *indices;
  int32_t *tops, *lefts;
  uint8_t *flips;
  Py_ssize_t n;
} moves;

static void free_moves(moves *given) {
  PyMem_Free(given->indices);
  PyMem_Free(given->tops);
  PyMem_Free(given->lefts);
  PyMem_Free(given->flips);
}

static bool copy_moves(PyObject *indices, PyObject *tops, PyObject *lefts, PyObject *flips, moves *given) {
  given->indices = pl_copied(indices, "indices", 'l', -1, &given->n);
  return given->indices != NULL && (given->tops = pl_copied(tops, "tops", 'i', given->n, NULL)) != NULL &&
         (given->lefts = pl_copied(lefts, "lefts", 'i', given->n, NULL)) != NULL &&
         (given->flips = pl_copied(flips, "flips", 'u', given->n, NULL)) != NULL;
}

static bool check_shape(int channels, int height, int width, int padding, int reflect) {
  if (channels < 1 || channels > 4096 || height < 1 || height > PL_MAX_OUTPUT || width < 1 || width > PL_MAX_OUTPUT)
    PyErr_Format(PyExc_ValueError, "shape (%d, %d, %d) is not in 1 to %d", channels, height, width, PL_MAX_OUTPUT);
  else if (padding < 0 || padding > PL_MAX_OUTPUT)
    PyErr_Format(PyExc_ValueError, "padding %d is not in 0 to %d", padding, PL_MAX_OUTPUT);
  else if (reflect && (padding >= height || padding >= width))
    PyErr_Format(PyExc_ValueError, "padding %d reflects more than %d x %d pixels hold", padding, height, width);
  else
    return true;
  return false;
}

static bool check_moves(const moves *given, Py_ssize_t num_images, int padding) {
  for (Py_ssize_t i = 0; i < given->n; i++) {
    if (given->indices[i] < 0 || given->indices[i] >= num_images) {
      PyErr_Format(PyExc_ValueError, "indices[%zd] is %lld, of %zd images", i, (long long)given->indices[i],
                   num_images);
      return false;
    }
    int top = given->tops[i], left = given->lefts[i];
    if (top >= 0 && top <= 2 * padding && left >= 0 && left <= 2 * padding) continue;
    PyErr_Format(PyExc_ValueError, "tops[%zd], lefts[%zd] are %d, %d, not in 0 to %d", i, i, top, left, 2 * padding);
    return false;
  }
  return true;
}

PyObject *pl_python_move(PyObject *module, PyObject *args, PyObject *named) {
  (void)module;
  static char *names[] = {"images", "indices", "tops", "lefts", "flips", "padding", "reflect", "shape", "out", NULL};
  PyObject *images, *indices, *tops, *lefts, *flips, *out;
  int padding, reflect, channels, height, width;
  if (!PyArg_ParseTupleAndKeywords(args, named, "OOOOOip(iii)O:move", names, &images, &indices, &tops, &lefts, &flips,
                                   &padding, &reflect, &channels, &height, &width, &out))
    return NULL;
  if (!check_shape(channels, height, width, padding, reflect)) return NULL;
  Py_ssize_t image_bytes = (Py_ssize_t)channels * height * width;
  Py_buffer from, to;
  if (pl_borrow(images, "images", 'u', -1, 0, &from)) return NULL;
  moves given = {0};
  bool is_good = copy_moves(indices, tops, lefts, flips, &given);
  if (is_good && (from.len % image_bytes != 0 || given.n > PY_SSIZE_T_MAX / image_bytes)) {
    PyErr_Format(PyExc_ValueError, "images has %zd bytes, which are no images of %zd", from.len, image_bytes);
    is_good = false;
  }
  is_good = is_good && check_moves(&given, from.len / image_bytes, padding) &&
            pl_borrow(out, "out", 'u', given.n * image_bytes, 1, &to) == 0;
  if (is_good) {
    Py_BEGIN_ALLOW_THREADS
    pl_move(from.buf, given.indices, given.tops, given.lefts, given.flips, (size_t)given.n, channels, height, width,
            padding, reflect, to.buf);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&to);
  }
  PyBuffer_Release(&from);
  free_moves(&given);
  if (!is_good) return NULL;
  Py_RETURN_NONE;
}
