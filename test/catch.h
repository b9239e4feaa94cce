// Catch2 2.13 (one header) and 3.x (a library) under one name.
#pragma once
// An exception in an assertion ends its test case, instead of being caught at each assertion.
#define CATCH_CONFIG_FAST_COMPILE
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
