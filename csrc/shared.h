/* What threads share, where Python has no lock of its own (free threading). With that lock none of
 * them runs between two lines of these files, unless the lock is released or Python code is called,
 * and all of this is as if it were not written. */
#ifndef GPUOPS_SHARED_H
#define GPUOPS_SHARED_H

#include <Python.h>
#include <stdbool.h>

#ifdef Py_GIL_DISABLED

/* What stands between these two is done by one thread at a time for the same object, as long as no
 * Python code runs in it. There is no way out of it but through its end. */
#define BEGIN_ALONE(object) Py_BEGIN_CRITICAL_SECTION(object)
#define END_ALONE() Py_END_CRITICAL_SECTION()

/* A field that one thread may set while others read it. */
#define LOAD_SHARED(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define STORE_SHARED(place, value) __atomic_store_n(&(place), (value), __ATOMIC_RELEASE)
/* Sets a pointer that nobody has set before; whether that was so. */
#define SET_SHARED_ONCE(place, value)                                                              \
    __sync_bool_compare_and_swap(&(place), (__typeof__(place))NULL, (value))

/* In a deallocator. Another thread may be about to drop the last weak reference, so that only
 * Python can tell whether there are any. */
#define CLEAR_WEAK_REFERENCES(self, list) PyObject_ClearWeakRefs(self)

#else

#define BEGIN_ALONE(object) {
#define END_ALONE() }
#define LOAD_SHARED(place) (place)
#define STORE_SHARED(place, value) ((place) = (value))
#define SET_SHARED_ONCE(place, value) ((place) == NULL ? ((place) = (value), true) : false)
#define CLEAR_WEAK_REFERENCES(self, list)                                                          \
    do {                                                                                           \
        if ((list) != NULL) PyObject_ClearWeakRefs(self);                                          \
    } while (0)

#endif

#endif
