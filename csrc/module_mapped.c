/* The Python type `Mapped`: the bytes of a file that may be cut short, as a buffer. */
#include "binding.h"
#include "mapped.h"

typedef struct {
  PyObject_HEAD
  pl_mapping *mapping;
  Py_ssize_t num_bytes;
  int is_private;
} MappedObject;

static PyObject *mapped_new(PyTypeObject *type, PyObject *args, PyObject *named) {
  static char *names[] = {"descriptor", "num_bytes", "name", "offset", "is_private", NULL};
  int descriptor, is_private = 0;
  Py_ssize_t num_bytes;
  const char *name;
  long long offset = 0;
  if (!PyArg_ParseTupleAndKeywords(args, named, "iny|Lp:Mapped", names, &descriptor, &num_bytes, &name, &offset,
                                   &is_private))
    return NULL;
  if (num_bytes < 1) return PyErr_Format(PyExc_ValueError, "num_bytes %zd is not above 0", num_bytes);
  MappedObject *self = (MappedObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (self == NULL) return NULL;
  self->num_bytes = num_bytes;
  self->is_private = is_private;
  self->mapping = pl_mapping_new(descriptor, (size_t)num_bytes, (off_t)offset, is_private != 0, name);
  if (self->mapping != NULL) return (PyObject *)self;
  Py_DECREF(self);
  return PyErr_SetFromErrno(PyExc_OSError);
}

static void mapped_dealloc(PyObject *object) {
  MappedObject *self = (MappedObject *)object;
  PyTypeObject *type = Py_TYPE(object);
  if (self->mapping != NULL) pl_mapping_free(self->mapping);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static int lend(PyObject *object, Py_buffer *view, int flags) {
  MappedObject *self = (MappedObject *)object;
  return PyBuffer_FillInfo(view, object, pl_mapping_bytes(self->mapping), self->num_bytes, !self->is_private, flags);
}

PyObject *pl_python_cut_file(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  const char *name = pl_mapping_cut();
  return name != NULL ? PyBytes_FromString(name) : Py_NewRef(Py_None);
}

static PyType_Slot mapped_slots[] = {
    {Py_tp_doc, "Bytes of a file, mapped, which may be cut short while they are in use."},
    {Py_tp_new, (void *)mapped_new},
    {Py_tp_dealloc, (void *)mapped_dealloc},
    {Py_bf_getbuffer, (void *)lend},
    {0, NULL},
};
static PyType_Spec mapped_spec = {.name = "paceline.data._native.Mapped",
                                  .basicsize = sizeof(MappedObject),
                                  .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                  .slots = mapped_slots};

int pl_add_mapped_type(PyObject *module, pl_state *state) {
  state->mapped_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &mapped_spec, NULL);
  if (state->mapped_type == NULL) return -1;
  return PyModule_AddType(module, state->mapped_type);
}
