#include "training/plan/datasheet.h"

#include "test/catch.h"

using namespace train_gpt;

TEST_CASE("a GPU is found in the table by its name and its multiprocessors") {
    CHECK(datasheet_flops("NVIDIA A100-SXM4-80GB", 108) == Approx(312e12));
    CHECK(datasheet_flops("NVIDIA H100 80GB HBM3", 132) == Approx(989.4e12));
    CHECK(datasheet_flops("NVIDIA H100 PCIe", 114) == Approx(756e12));
    CHECK(datasheet_flops("NVIDIA H100 NVL", 132) == Approx(835e12));
    CHECK(datasheet_flops("NVIDIA H200", 132) == Approx(989.4e12));
    CHECK(datasheet_flops("NVIDIA GH200 480GB", 132) == Approx(989.4e12));
    CHECK(datasheet_flops("NVIDIA H20", 78) == Approx(148e12));
    CHECK(datasheet_flops("NVIDIA B200", 148) == Approx(2250e12));
    CHECK(datasheet_flops("NVIDIA L40S", 142) == Approx(362e12));
    CHECK(datasheet_flops("NVIDIA GeForce RTX 4090", 128) == Approx(165.2e12));
}

TEST_CASE("slices, variants and GPUs that the table does not have are not guessed") {
    CHECK(datasheet_flops("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42) == 0);
    CHECK(datasheet_flops("NVIDIA GeForce RTX 4090 Laptop GPU", 76) == 0);
    CHECK(datasheet_flops("NVIDIA GB200", 148) == 0);  // other clocks than a B200's
    CHECK(datasheet_flops("Tesla T4", 40) == 0);
    CHECK(datasheet_flops("", 0) == 0);
    CHECK(datasheet_flops(Device{}, DType::bf16) == 0);
}
