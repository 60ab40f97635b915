/* Arguments of Python's functions: borrowed or copied memory of known type and length, and numbers in their ranges. */
#include "binding.h"

#include <stdbool.h>
#include <string.h>

typedef struct {
  char kind;
  Py_ssize_t size;
  const char *formats; /* of the struct module; `l` and `L` have 8 bytes here, as on every 64-bit Linux and macOS */
  const char *name;
} item;

static const item ITEMS[] = {
    {'u', 1, "B?", "uint8"}, {'i', 4, "il", "int32"},   {'l', 8, "lq", "int64"},
    {'L', 8, "LQ", "uint64"},  {'d', 8, "d", "float64"},
};

static const item *find_item(char kind) {
  for (size_t i = 0; i < sizeof ITEMS / sizeof *ITEMS; i++)
    if (ITEMS[i].kind == kind) return &ITEMS[i];
  return NULL;
}

/* Return whether `format` says the item, in this machine's order of bytes. */
static bool is_format(const char *format, const item *wanted) {
  if (format == NULL) format = "B";
  if (strchr("@=<|", *format) != NULL && *format != '\0') format++;
  return *format != '\0' && format[1] == '\0' && strchr(wanted->formats, *format) != NULL;
}

int pl_borrow(PyObject *object, const char *name, char kind, Py_ssize_t num_items, int is_written, Py_buffer *view) {
  if (PyObject_GetBuffer(object, view, PyBUF_FORMAT | PyBUF_ND | PyBUF_STRIDES | (is_written ? PyBUF_WRITABLE : 0))) {
    if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError))
      PyErr_Format(PyExc_ValueError, "%s cannot be borrowed%s", name, is_written ? " to be written" : "");
    else if (PyErr_ExceptionMatches(PyExc_TypeError))
      PyErr_Format(PyExc_TypeError, "%s has no memory to borrow (pass an array or bytes)", name);
    return -1;
  }
  const item *wanted = find_item(kind);
  if (!PyBuffer_IsContiguous(view, 'C'))
    PyErr_Format(PyExc_ValueError, "%s is not contiguous (pass a copy)", name);
  else if (wanted != NULL && (view->itemsize != wanted->size || !is_format(view->format, wanted)))
    PyErr_Format(PyExc_TypeError, "%s is of items of format '%s', not %s", name, view->format ? view->format : "B",
                 wanted->name);
  else if (wanted != NULL && num_items >= 0 && view->len / wanted->size != num_items)
    PyErr_Format(PyExc_ValueError, "%s has %zd items, not %zd", name, view->len / wanted->size, num_items);
  else
    return 0;
  PyBuffer_Release(view);
  return -1;
}

void *pl_copied(PyObject *object, const char *name, char kind, Py_ssize_t wanted, Py_ssize_t *num_items) {
  Py_buffer view;
  if (pl_borrow(object, name, kind, wanted, 0, &view)) return NULL;
  void *copy = PyMem_Malloc(view.len > 0 ? (size_t)view.len : 1);
  if (copy != NULL && view.len > 0) memcpy(copy, view.buf, (size_t)view.len);
  if (copy == NULL) PyErr_NoMemory();
  if (num_items != NULL) *num_items = view.len / view.itemsize;
  PyBuffer_Release(&view);
  return copy;
}

int pl_check_output(int size, int channels, int stage) {
  if (size < 1 || size > PL_MAX_OUTPUT)
    PyErr_Format(PyExc_ValueError, "size %d is not in 1 to %d", size, PL_MAX_OUTPUT);
  else if (channels != 1 && channels != 3)
    PyErr_Format(PyExc_ValueError, "channels %d is neither 1 nor 3", channels);
  else if (stage < PL_ALL || stage > PL_NO_REDUCTION)
    PyErr_Format(PyExc_ValueError, "stage %d is not in 0 to 3", stage);
  else
    return 0;
  return -1;
}
