/* `paceline.data._native`: the functions that work in the caller's thread, without the GIL; and the module itself.
 *
 * What a function takes and gives is written in src/paceline/data/_native.pyi.
 */
#include "binding.h"

#include "pool.h"

/* A scratch for one call: an idle one, or a new one. NULL with an exception set where there is no memory. */
static pl_scratch *take_scratch(PyObject *module) {
  pl_state *state = PyModule_GetState(module);
  pl_scratch *scratch = state->num_kept > 0 ? state->kept[--state->num_kept] : pl_scratch_new();
  if (scratch == NULL) PyErr_NoMemory();
  return scratch;
}

static void give_back(PyObject *module, pl_scratch *scratch) {
  pl_state *state = PyModule_GetState(module);
  if (state->num_kept < PL_KEPT_SCRATCHES && pl_scratch_bytes(scratch) <= PL_KEPT_BYTES)
    state->kept[state->num_kept++] = scratch;
  else
    pl_scratch_free(scratch);
}

/* Return None for PL_OK, else NULL with an exception set. */
static PyObject *result(pl_status status) {
  if (status == PL_OK) Py_RETURN_NONE;
  if (status == PL_NO_MEMORY) return PyErr_NoMemory();
  PyErr_SetString(PyExc_ValueError, pl_reason(status));
  return NULL;
}

static PyObject *isa(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return PyUnicode_FromString(pl_isa_now() == PL_AVX2 ? "avx2" : "scalar");
}

static PyObject *choose_isa(PyObject *module, PyObject *name) {
  (void)module;
  if (!PyUnicode_Check(name)) return PyErr_Format(PyExc_TypeError, "name is not a string");
  if (PyUnicode_CompareWithASCIIString(name, "scalar") == 0)
    pl_isa_choose(PL_SCALAR);
  else if (PyUnicode_CompareWithASCIIString(name, "avx2") != 0)
    return PyErr_Format(PyExc_ValueError, "name %R is neither 'avx2' nor 'scalar'", name);
  else if (pl_isa_best() != PL_AVX2)
    return PyErr_Format(PyExc_ValueError, "this processor has no AVX2");
  else
    pl_isa_choose(PL_AVX2);
  Py_RETURN_NONE;
}

static PyObject *reason(PyObject *module, PyObject *status) {
  (void)module;
  long value = PyLong_AsLong(status);
  if (value == -1 && PyErr_Occurred()) return NULL;
  if (value < PL_OK || value > PL_NOT_INDEXABLE) return PyErr_Format(PyExc_ValueError, "status %ld is none", value);
  return PyUnicode_FromString(pl_reason((pl_status)value));
}

static PyObject *index_jpeg(PyObject *module, PyObject *args, PyObject *named) {
  static char *names[] = {"data", "every", NULL};
  PyObject *data;
  int every = 8;
  if (!PyArg_ParseTupleAndKeywords(args, named, "O|i:index_jpeg", names, &data, &every)) return NULL;
  if (every < 1 || every > 255) return PyErr_Format(PyExc_ValueError, "every %d is not in 1 to 255", every);
  Py_buffer view;
  if (pl_borrow(data, "data", '*', -1, 0, &view)) return NULL;
  pl_scratch *scratch = take_scratch(module);
  if (scratch == NULL) {
    PyBuffer_Release(&view);
    return NULL;
  }
  pl_indexed indexed;
  const char *why;
  Py_BEGIN_ALLOW_THREADS
  why = pl_index_jpeg(view.buf, (size_t)view.len, every, scratch, &indexed);
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&view);
  PyObject *record = NULL;
  if (why != NULL)
    PyErr_SetString(PyExc_ValueError, why);
  else
    record = PyBytes_FromStringAndSize((const char *)indexed.record, (Py_ssize_t)indexed.size);
  give_back(module, scratch);
  return record;
}

static PyObject *size_of(PyObject *module, PyObject *data) {
  (void)module;
  Py_buffer view;
  if (pl_borrow(data, "record", '*', -1, 0, &view)) return NULL;
  pl_record record;
  pl_status status = pl_record_open(view.buf, (size_t)view.len, &record);
  PyBuffer_Release(&view);
  if (status != PL_OK) return result(status);
  int is_lying = record.orientation >= 5; /* EXIF's 5 to 8 turn the image by a quarter */
  return Py_BuildValue("iii", is_lying ? record.width : record.height, is_lying ? record.height : record.width,
                       record.components);
}

static PyObject *decode_into(PyObject *module, PyObject *args, PyObject *named) {
  static char *names[] = {"record", "channels", "out", NULL};
  PyObject *data, *out;
  int channels;
  if (!PyArg_ParseTupleAndKeywords(args, named, "OiO:decode_into", names, &data, &channels, &out)) return NULL;
  if (pl_check_output(1, channels, PL_ALL)) return NULL;
  Py_buffer from, to;
  if (pl_borrow(data, "record", '*', -1, 0, &from)) return NULL;
  pl_record record;
  pl_status status = pl_record_open(from.buf, (size_t)from.len, &record);
  if (status != PL_OK ||
      pl_borrow(out, "out", 'u', (Py_ssize_t)record.width * record.height * channels, 1, &to)) {
    PyBuffer_Release(&from);
    return status != PL_OK ? result(status) : NULL;
  }
  pl_scratch *scratch = take_scratch(module);
  if (scratch != NULL) {
    Py_BEGIN_ALLOW_THREADS
    status = pl_decode_full(&record, channels, scratch, to.buf);
    Py_END_ALLOW_THREADS
    give_back(module, scratch);
  }
  PyBuffer_Release(&from);
  PyBuffer_Release(&to);
  return scratch != NULL ? result(status) : NULL;
}

static PyObject *decode_crop_into(PyObject *module, PyObject *args, PyObject *named) {
  static char *names[] = {"record", "box", "inside", "flip", "size", "channels", "out", "stage", NULL};
  PyObject *data, *out;
  pl_box box;
  int inside, flip, size, channels, stage = PL_ALL;
  if (!PyArg_ParseTupleAndKeywords(args, named, "O(dddd)ppiiO|i:decode_crop_into", names, &data, &box.top, &box.left,
                                   &box.height, &box.width, &inside, &flip, &size, &channels, &out, &stage))
    return NULL;
  if (pl_check_output(size, channels, stage)) return NULL;
  Py_buffer from, to;
  if (pl_borrow(data, "record", '*', -1, 0, &from)) return NULL;
  if (pl_borrow(out, "out", 'u', (Py_ssize_t)channels * size * size, 1, &to)) {
    PyBuffer_Release(&from);
    return NULL;
  }
  pl_status status = PL_OK;
  pl_scratch *scratch = take_scratch(module);
  if (scratch != NULL) {
    Py_BEGIN_ALLOW_THREADS
    pl_record record;
    status = pl_record_open(from.buf, (size_t)from.len, &record);
    if (status == PL_OK)
      status = pl_decode_crop(&record, box, inside, flip, size, channels, (pl_stage)stage, scratch, to.buf);
    Py_END_ALLOW_THREADS
    give_back(module, scratch);
  }
  PyBuffer_Release(&from);
  PyBuffer_Release(&to);
  return scratch != NULL ? result(status) : NULL;
}

/* ---- the module ------------------------------------------------------------------------------------------------ */

#define NAMED(function) (PyCFunction)(void (*)(void))function, METH_VARARGS | METH_KEYWORDS

static PyMethodDef functions[] = {
    {"isa", isa, METH_NOARGS, "Return which instructions are used: 'avx2' or 'scalar'."},
    {"choose_isa", choose_isa, METH_O, "Use these instructions from now on; all give the same bits."},
    {"reason", reason, METH_O, "Return what a person should read of a status."},
    {"index_jpeg", NAMED(index_jpeg), "Return the record of a whole JPEG file."},
    {"size_of", size_of, METH_O, "Return (height, width, channels) of a record, upright."},
    {"decode_into", NAMED(decode_into), "Decode a whole record into uint8 [H, W, channels]."},
    {"decode_crop_into", NAMED(decode_crop_into), "Decode a box of a record into uint8 [channels, size, size]."},
    {"move", NAMED(pl_python_move), "Pad, cut and mirror images of a batch into uint8 [N, C, H, W]."},
    {"cut_file", pl_python_cut_file, METH_NOARGS, "Return the name of a file that was cut short while it was mapped."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
  pl_state *state = PyModule_GetState(module);
  if (PyModule_AddIntConstant(module, "VERSION", PL_VERSION)) return -1;
  if (pl_add_mapped_type(module, state)) return -1;
  return pl_add_pool_types(module, state);
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
  pl_state *state = PyModule_GetState(module);
  Py_VISIT(state->pool_type);
  Py_VISIT(state->task_type);
  Py_VISIT(state->mapped_type);
  return 0;
}

static int clear(PyObject *module) {
  pl_state *state = PyModule_GetState(module);
  Py_CLEAR(state->pool_type);
  Py_CLEAR(state->task_type);
  Py_CLEAR(state->mapped_type);
  return 0;
}

static void release(void *module) {
  pl_state *state = PyModule_GetState(module);
  while (state->num_kept > 0) pl_scratch_free(state->kept[--state->num_kept]);
  (void)clear(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "paceline.data._native",
    .m_doc = "The native core of the data path: indexed JPEG decoded by region, without the GIL.",
    .m_size = sizeof(pl_state),
    .m_methods = functions,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = release,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
