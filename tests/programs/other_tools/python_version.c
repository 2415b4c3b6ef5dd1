/* Takes the place of Python's function that returns its version. */
#include <stdlib.h>

const char *Py_GetVersion(void) { return getenv("FAKE_PYTHON_VERSION"); }
