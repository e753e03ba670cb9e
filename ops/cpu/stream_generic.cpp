// The streaming pass for processors that have no copy of their own.
#include "common.h"

namespace dss::generic {
#include "vec_generic.h"
#include "codec_values.h"
#include "stream.h"
Variant variant() { return table("generic"); }
}  // namespace dss::generic
