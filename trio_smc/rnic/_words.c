/* Words of shared memory with the order of C11's atomics, in the stable ABI of Python 3.11: see
 * words.py, which has the theory of operation.  Nothing else belongs here. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

_Static_assert(sizeof(uint64_t) == sizeof(unsigned long long), "words have 8 bytes");
_Static_assert(__atomic_always_lock_free(8, 0), "words need lock-free atomics");

/* load_acquire is words[index], and store_release is words[index] = value. */
typedef struct {
    PyObject_HEAD
    uint64_t *first;  /* NULL after release() */
    Py_ssize_t count;
    Py_buffer buffer;
} Words;

static uint64_t *
word_at(Words *self, PyObject *key)
{
    Py_ssize_t index = PyNumber_AsSsize_t(key, PyExc_IndexError);
    if (index == -1 && PyErr_Occurred())
        return NULL;
    if (self->first != NULL && index >= 0 && index < self->count)
        return self->first + index;
    if (self->first == NULL)
        PyErr_SetString(PyExc_ValueError, "the words are released");
    else
        PyErr_SetString(PyExc_IndexError, "there is no such word");
    return NULL;
}

static PyObject *
load_acquire(Words *self, PyObject *key)
{
    uint64_t *word = word_at(self, key);
    if (word == NULL)
        return NULL;
    return PyLong_FromUnsignedLongLong(__atomic_load_n(word, __ATOMIC_ACQUIRE));
}

static int
store_release(Words *self, PyObject *key, PyObject *value)
{
    uint64_t *word = word_at(self, key);
    if (word == NULL)
        return -1;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "words cannot be deleted");
        return -1;
    }
    unsigned long long number = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred())
        return -1;
    __atomic_store_n(word, number, __ATOMIC_RELEASE);
    return 0;
}

static PyObject *
exchange(Words *self, PyObject *arguments)
{
    PyObject *key;
    unsigned long long number;
    if (!PyArg_ParseTuple(arguments, "OK", &key, &number))
        return NULL;
    uint64_t *word = word_at(self, key);
    if (word == NULL)
        return NULL;
    return PyLong_FromUnsignedLongLong(__atomic_exchange_n(word, number, __ATOMIC_SEQ_CST));
}

static PyObject *
fence(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyObject *
release_words(Words *self, PyObject *Py_UNUSED(unused))
{
    if (self->first != NULL) {
        self->first = NULL;
        PyBuffer_Release(&self->buffer);
    }
    Py_RETURN_NONE;
}

static PyObject *
new_words(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"memory", NULL};
    PyObject *memory;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O", names, &memory))
        return NULL;
    Words *self = (Words *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    if (PyObject_GetBuffer(memory, &self->buffer, PyBUF_WRITABLE) == 0) {
        self->first = self->buffer.buf;  /* from here on the buffer is held */
        self->count = self->buffer.len / (Py_ssize_t)sizeof(uint64_t);
        if ((uintptr_t)self->first % sizeof(uint64_t) == 0)
            return (PyObject *)self;
        PyErr_SetString(PyExc_ValueError, "words must be aligned");
    }
    Py_DECREF(self);
    return NULL;
}

static void
free_words(Words *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_DECREF(release_words(self, NULL));
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef words_methods[] = {
    {"exchange", (PyCFunction)exchange, METH_VARARGS, "Store a value; return the old one."},
    {"release", (PyCFunction)release_words, METH_NOARGS, "Give the memory up.  Idempotent."},
    {NULL},
};
static PyType_Slot words_slots[] = {
    {Py_tp_new, new_words}, {Py_tp_dealloc, free_words}, {Py_tp_methods, words_methods},
    {Py_mp_subscript, load_acquire}, {Py_mp_ass_subscript, store_release}, {0, NULL},
};
static PyType_Spec words_spec = {
    "trio_smc.rnic._words.Words", sizeof(Words), 0, Py_TPFLAGS_DEFAULT, words_slots,
};
static PyMethodDef functions[] = {
    {"fence", fence, METH_NOARGS, "A sequentially consistent fence."}, {NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_words", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__words(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = PyType_FromSpec(&words_spec);
    if (module != NULL && type != NULL && PyModule_AddObjectRef(module, "Words", type) == 0) {
        Py_DECREF(type);
        return module;
    }
    Py_XDECREF(type);
    Py_XDECREF(module);
    return NULL;
}
