/* The rows of ops.def as a table. */
#include "gpuops.h"

const Operator operators[OPERATORS] = {
#define OPERATOR(name, stem, work, signature, doc)                                                 \
    {OPERATOR_##name, work, #name, signature, plan_##name, run_##name},
#include "ops.def"
#undef OPERATOR
};
