// This process: what it sets up before main() does anything else.
#pragma once

namespace train_gpt {

/// Must be called first in main(). Makes waiting OpenMP threads sleep after a few microseconds;
/// libgomp's spin for milliseconds by default. When other programs also use the cores, a spinning
/// thread occupies the core that another thread of its team needs, and steps take several times as
/// long. libgomp reads its settings from the environment when it is loaded, so the program restarts
/// itself with GOMP_SPINCOUNT set, under the same name. Does nothing when the user has set
/// GOMP_SPINCOUNT or OMP_WAIT_POLICY.
void limit_openmp_spinning(char** argv);

}  // namespace train_gpt
