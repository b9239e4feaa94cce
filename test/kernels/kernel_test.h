// What the tests of kernels share: the device they run on, tensors that own their memory and start
// poisoned, a stream, and error bounds that follow from the dtype.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <omp.h>

#include "test/catch.h"
#include "test/kernels/buffer.h"
#include "test/kernels/result_checks.h"
#include "test/kernels/test_device.h"
#include "test/random.h"
