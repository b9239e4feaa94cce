# train_gpt. `make help` lists the targets.
#
#   make [VARIABLE=value …] [target]
#     CXX=g++-12           the C++ compiler
#     MARCH=native         CPU that kernels/ is compiled for
#     CUDA=0|1|auto        no, required, or only if a GPU is here; default: if nvcc is here
#     CUDA_HOME=/opt/cuda  where the CUDA toolkit is
#     GPU_ARCHS="80 90"    GPU architectures, or all; default: those present
#     MPI=0|1              no, or required; default: if found
#     ONEDNN=0             without oneDNN
#     DEBUG=1              no optimisation, checked library
#     SANITIZE=address,undefined|thread
#     WERROR=1             warnings are errors
#     PRECOMPILE=0         without precompiled headers
#     UNITY=0              each file is compiled by itself; default: up to 6 of a folder at once
#     PREFIX= DESTDIR=     where `make install` copies to
#     GPUSIM=folder        tests run on a simulated GPU too, whose sources are in this folder
#     MEMCHECK=1           tests of kernels run under compute-sanitizer
#     ONLY="loader_test"   of the files of tests, the test program has only these
#     TESTS=1              `make bundle` adds the tests and build/compare, for make gpu-check on a
#                          node without a compiler

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
.DEFAULT_GOAL := all

ifeq ($(origin CXX),default)
CXX := g++
endif
MARCH ?= native
CUDA ?=
MPI ?=
ONEDNN ?=
DEBUG ?=
SANITIZE ?=
WERROR ?=
PRECOMPILE ?= 1
UNITY ?= 6
ifneq ($(shell [[ '$(UNITY)' =~ ^[0-9]{0,3}$$ ]] && echo 1),1)
$(error UNITY=$(UNITY) is not a number of files, such as UNITY=6)
endif
GPU_ARCHS ?=
GPUSIM ?=
MEMCHECK ?=
CUDA_HOME ?=
PREFIX ?= /usr/local
TEST_ARGS ?=
ONLY ?=
TESTS ?=
GPU_CHECK_ARGS ?=
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?=
# The folder in which `scripts/data.sh gpt2` puts GPT-2's vocabulary. Tests and benchmarks use it.
export GPT2_VOCAB_DIR ?= $(abspath $(wildcard data/gpt2))

# Uses all cores, unless the user or a parent make gives -j.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc)
endif

# Builds that must not mix have separate folders: build/, build/debug/, build/address-undefined/, …
comma := ,
empty :=
space := $(empty) $(empty)
VARIANT := $(subst $(space),-,$(strip $(if $(filter-out 0,$(DEBUG)),debug) \
    $(subst $(comma),-,$(SANITIZE))))
B := build$(if $(VARIANT),/$(VARIANT))
O := $(B)/objects

DIRECTORIES := base device tokenizer dataloader dataloader/parquet kernels kernels/attention \
    kernels/experts kernels/linear kernels/muon model model/families parallel \
    $(addprefix parallel/,axes launch net pipeline state watchdog) training \
    $(addprefix training/,commands config evaluations files look plan report supervise sweep watch)
SOURCES := $(sort $(wildcard $(addsuffix /*.cpp,$(DIRECTORIES))))
CUDA_SOURCES := $(sort $(wildcard $(addsuffix /*.cu,$(DIRECTORIES))))
# Files without a kernel are compiled without nvcc, which reads every header once per architecture
# and twice more.
HOST_CUDA_SOURCES := $(if $(CUDA_SOURCES),$(shell grep -L __global__ $(CUDA_SOURCES)))
PROGRAMS := test/bench.cpp test/bench_tokenizer.cpp test/compare.cpp test/fuzz/fuzz.cpp \
    test/parallel/observed_nccl.cpp test/commands/early_signal.cpp test/commands/faulty_machine.cpp
TEST_SOURCES := $(filter-out $(PROGRAMS),$(sort $(wildcard test/*.cpp test/*/*.cpp)))
ifneq ($(ONLY),)
$(foreach name,$(ONLY),$(if $(filter %/$(name).cpp,$(TEST_SOURCES)),, \
    $(error ONLY: there is no test/*/$(name).cpp)))
TEST_SOURCES := $(filter-out %_test.cpp,$(TEST_SOURCES)) \
    $(filter $(foreach name,$(ONLY),%/$(name).cpp),$(TEST_SOURCES))
endif
HEADERS := $(sort $(wildcard $(addsuffix /*.h,$(DIRECTORIES)) $(addsuffix /*.cuh,$(DIRECTORIES)) \
    test/*.h test/*/*.h))

# --- What this machine has ------------------------------------------------------------------------
# scripts/configure.sh looks once; it looks again when a variable below, a tool or a library has
# changed.

CONFIGURE = CXX='$(CXX)' CPPFLAGS='$(CPPFLAGS)' CXXFLAGS='$(CXXFLAGS)' LDFLAGS='$(LDFLAGS)' \
    MARCH='$(MARCH)' CUDA='$(CUDA)' MPI='$(MPI)' ONEDNN='$(ONEDNN)' CUDA_HOME='$(CUDA_HOME)' \
    GPU_ARCHS='$(GPU_ARCHS)'

# The quickstart sets CUDA=auto. GPU kernels take minutes to compile, so without a GPU only a build
# that already has them keeps them.
ifeq ($(CUDA),auto)
ifneq ($(shell nvidia-smi -L 2> /dev/null | grep -m 1 ^GPU; \
    grep -sx 'HAVE_CUDA := 1' $(B)/config.mk),)
override CUDA :=
endif
endif

ifneq ($(filter-out clean help format setup quickstart test test-full fuzz build/fuzz/fuzz, \
    $(or $(MAKECMDGOALS),all)),)
MACHINE := $(shell command -v $(CXX) nvcc mpicxx; \
    { cat scripts/configure.sh scripts/find-cuda.sh; $(CXX) -dumpfullversion; \
    grep -m1 ^flags /proc/cpuinfo; } 2> /dev/null | cksum) \
    $(wildcard $(foreach header,dnnl.hpp openssl/ssl.h zlib.h zstd.h snappy-c.h lz4.h xxhash.h \
        pcre2.h utf8proc.h CLI/CLI.hpp nlohmann/json.hpp catch2/catch.hpp catch2/catch_all.hpp, \
        /usr/include/$(header) /usr/include/*/$(header) /usr/local/include/$(header)) \
        /usr/local/cuda/bin/nvcc /opt/cuda/bin/nvcc \
        $(addsuffix /nccl.h,/usr/local/cuda/include /usr/include) \
        $(addsuffix /cudnn_frontend.h,third_party/*/include /usr/local/cuda/include /usr/include) \
        $(addsuffix /include/cudnn.h,$(CUDNN_PATH) $(CONDA_PREFIX) \
            $(VIRTUAL_ENV)/lib/python3*/site-packages/nvidia/cudnn))
SETTINGS := $(subst $(comma),;,$(CONFIGURE) $(MACHINE))
include $(B)/config.mk
ifneq ($(and $(HAVE_ONEDNN),$(HAVE_TLS),$(HAVE_ZLIB),$(HAVE_ZSTD),$(HAVE_SNAPPY),$(HAVE_LZ4), \
    $(HAVE_CUDA),$(HAVE_MPI),$(CONFIGURED)),$(SETTINGS))
$(B)/config.mk: $(if $(MAKE_RESTARTS),,FORCE)
endif
endif

# Another make may run at the same time. Each writes its own file and renames it, so the result is
# always complete.
$(B)/config.mk:
	@mkdir -p $(B)
	@new=$$(mktemp $@.XXXXXX) && trap 'rm -f "$$new"' EXIT && chmod 644 "$$new" && \
	    $(CONFIGURE) scripts/configure.sh > "$$new" && \
	    printf 'CONFIGURED := %s\n' "$$SETTINGS" >> "$$new" && mv "$$new" $@
$(B)/config.mk: export SETTINGS := $(SETTINGS)

# --- Compiler flags -------------------------------------------------------------------------------
# Only the mathematics in kernels/ is compiled for MARCH, so that the program also starts on an
# older CPU and can name the missing instructions. Only kernels/ and the tokenizer get -O3: the rest
# compiles a tenth faster without it.

OPTIMISE := -O2
ifneq ($(SANITIZE),)
OPTIMISE := -O1 -g1 -fno-omit-frame-pointer -fsanitize=$(SANITIZE) -fno-sanitize-recover=all
endif
ifneq ($(filter-out 0,$(DEBUG)),)
OPTIMISE := -Og -g -D_GLIBCXX_ASSERTIONS $(filter -fsanitize% -fno-%,$(OPTIMISE))
endif

DEFINES := -I. $(if $(filter 1,$(HAVE_ONEDNN)),-DTRAIN_GPT_ONEDNN) \
    $(if $(filter 1,$(HAVE_CUDA)),-DTRAIN_GPT_CUDA) $(if $(filter 1,$(HAVE_MPI)),-DTRAIN_GPT_MPI) \
    $(if $(filter 1,$(HAVE_ZLIB)),-DTRAIN_GPT_ZLIB) $(if $(filter 1,$(HAVE_ZSTD)),-DTRAIN_GPT_ZSTD)
FLAGS := -std=c++20 $(OPTIMISE) -fopenmp -ffp-contract=fast -Wall -Wextra \
    $(if $(filter-out 0,$(WERROR)),-Werror)
# UBSan asks the kernel for a pipe to look at an object's type, and reports a wrong type where a
# test has used up all descriptors.
FLAGS += $(if $(findstring undefined,$(SANITIZE)),-fno-sanitize=vptr)
ifneq ($(filter 12 12.%,$(shell $(CXX) -dumpversion 2> /dev/null)),)
# GCC 12 warns wrongly of overlapping copies in std::string (GCC bug 105651) and, with sanitizers,
# of unset values in <regex> (105562) and of copies and reads beyond the end of a moved std::string.
FLAGS += -Wno-restrict \
    $(if $(SANITIZE),-Wno-maybe-uninitialized -Wno-array-bounds -Wno-stringop-overread)
endif
# Headers that nearly every file includes; they are precompiled (below).
STANDARD := algorithm array atomic cmath cstdint cstdio cstring filesystem functional map memory \
    mutex optional set span sstream string string_view unordered_map utility vector
KERNEL_FLAGS := $(filter -O3,$(OPTIMISE:-O2=-O3)) -march=$(MARCH) $(VECTORS) -fno-math-errno \
    -fno-trapping-math
COMPILE = $(CXX) $(DEFINES) $(CPPFLAGS) $(FLAGS) $(CXXFLAGS)
LIBRARIES := $(if $(filter 1,$(HAVE_ONEDNN)),-ldnnl) \
    $(if $(filter 1,$(HAVE_MPI)),$(MPI_LIBRARIES)) $(if $(filter 1,$(HAVE_ZLIB)),-lz) \
    $(if $(filter 1,$(HAVE_ZSTD)),-lzstd) $(if $(filter 1,$(HAVE_SNAPPY)),-lsnappy) \
    $(if $(filter 1,$(HAVE_LZ4)),-llz4) $(if $(filter 1,$(HAVE_TLS)),-lssl -lcrypto) \
    -lxxhash -lpcre2-8 -lutf8proc -lpthread -ldl

ifeq ($(HAVE_CUDA),1)
DEFINES += -isystem $(CUDA_PATH)/include
# The PTX that drivers compile for GPUs without code of their own: not that of 12.x, which excludes
# 11.x.
LATER_GPUS := $(lastword $(or $(filter-out 12%,$(CUDA_ARCHS)),$(CUDA_ARCHS)))
# Line numbers for NVIDIA's tools make the kernels of each architecture three times as large.
NVCC_FLAGS := -std=c++20 -O3 $(if $(filter portable,$(VARIANT)),--compress-mode=size,-lineinfo) \
    --expt-relaxed-constexpr -ccbin $(firstword $(CXX)) \
    $(foreach arch,$(CUDA_ARCHS),-gencode arch=compute_$(arch),code=sm_$(arch)) \
    -gencode arch=compute_$(LATER_GPUS),code=compute_$(LATER_GPUS) \
    $(if $(filter-out 0,$(WERROR)),-Werror all-warnings) -Xcompiler=-fopenmp,-Wall,-Wextra
# Files with Hopper's own instructions (wgmma), which only code for sm_90a has. Simulators read its
# PTX.
SM90A_OBJECTS := $(patsubst %,$(O)/%.o,$(filter-out $(HOST_CUDA_SOURCES), \
    $(filter %wgmma.cu %wgmma_forward.cu %wgmma_backward.cu,$(CUDA_SOURCES))))
ifneq ($(filter 90,$(CUDA_ARCHS)),)
$(SM90A_OBJECTS): private NVCC_FLAGS := $(filter-out -gencode arch=%,$(NVCC_FLAGS)) \
    -gencode arch=compute_90a,code=[sm_90a$(comma)compute_90a] -DTRAIN_GPT_SM90A
endif
LIBRARIES += -L$(CUDA_PATH)/lib64 -Wl,-rpath,$(CUDA_PATH)/lib64 -lcudart
ifeq ($(VARIANT),portable)
LIBRARIES += -Wl,-rpath,'$$ORIGIN':/usr/local/cuda/lib64
endif
endif

# "0.9.0 (1fd11b0)": the file VERSION has the number, git the commit; where there is no git, the
# file COMMIT may have it.
COMMIT := $(shell git describe --always --dirty --exclude='*' 2> /dev/null || \
    cat COMMIT 2> /dev/null)
VERSION := $(strip $(shell cat VERSION) $(if $(COMMIT),($(COMMIT))))

# A file with this text as its content. It is rewritten only when the text changes.
define stamp
$(1): FORCE
	@mkdir -p $$(@D)
	@printf '%s\n' '$(subst ','\'',$(2))' | cmp -s - $$@ || printf '%s\n' '$(subst ','\'',$(2))' > $$@
endef
$(eval $(call stamp,$(B)/flags,$(COMPILE) $(KERNEL_FLAGS) $(NVCC_FLAGS) $(LIBRARIES) $(LDFLAGS) \
    $(STANDARD)))
$(eval $(call stamp,$(B)/version,$(VERSION)))
$(eval $(call stamp,$(B)/only,$(ONLY)))
$(eval $(call stamp,$(B)/cudnn,$(CUDNN_FRONTEND) $(CUDNN_INCLUDE)))
$(eval $(call stamp,$(B)/nccl,$(NCCL)))
$(eval $(call stamp,$(B)/mpi,$(MPI_INCLUDES)))
$(eval $(call stamp,$(B)/tls,$(HAVE_TLS)))
$(eval $(call stamp,$(B)/codecs,$(HAVE_SNAPPY) $(HAVE_LZ4)))
FORCE:

# Tests share these with build/compare, which does not use Catch2.
COMPARE_SOURCES := $(filter test/compare/%.cpp test/kernels/%_operations.cpp \
    test/kernels/reference.cpp test/kernels/test_device.cpp,$(TEST_SOURCES))
# These are compiled for MARCH.
MATHEMATICS := base/random.cpp device/instruction_set.cpp \
    $(filter-out $(addprefix kernels/attention/,cudnn.cpp cudnn_limits.cpp engine.cpp), \
        $(filter kernels/%,$(SOURCES)))
OF_JSON := $(shell grep -lE -e '<nlohmann/|"base/json_|"training/(report|sweep)/[a-z_]+\.h"' \
    -e '"training/(config/config_keys|watch/shard_watch|data_use|run_data|run)\.h"' \
    $(SOURCES) train_gpt.cu)
# Code that reads settings, controls a run or tests is compiled with -O1: optimising it takes long
# and speeds up nothing that matters. Exceptions are code that processes whole texts or all weights
# of a model, and the reference loops of kernel tests.
CONTROL := $(filter-out dataloader/jsonl.cpp $(addprefix training/files/,stored_model.cpp \
    llmc_model.cpp),$(filter training/%.cpp,$(SOURCES)) $(OF_JSON) \
    $(shell grep -l '<cudnn_frontend' $(SOURCES))) test/compare.cpp \
    $(filter-out test/kernels/reference.cpp,$(TEST_SOURCES))

# Files that need more flags than others.
PAGES := training/report/page.cpp training/sweep/sweep_page.cpp training/look/look_page.cpp
WITH_MPI := parallel/launch/membership_mpi.cpp parallel/links_mpi.cpp
WITH_TLS := parallel/net/channel.cpp test/parallel/channel_test.cpp
WITH_CODECS := dataloader/parquet/codecs.cpp test/dataloader/parquet_writer.cpp

# A unit is up to UNITY files of a folder that the compiler reads at once. They share the time for
# headers and templates, so that the program compiles in half of the time. These are compiled by
# themselves: files with flags of their own, and the mathematics, since what is inlined there can
# change a result's bits. So are the tests that ONLY names.
SINGLE := $(MATHEMATICS) $(COMPARE_SOURCES) $(PAGES) $(WITH_MPI) $(WITH_TLS) $(WITH_CODECS) \
    base/version.cpp device/processor.cpp kernels/attention/cudnn.cpp test/main.cpp \
    $(if $(ONLY),$(TEST_SOURCES)) \
    $(if $(filter-out 0 1,$(UNITY)),,$(SOURCES) $(TEST_SOURCES))
AFTER_UNITY := $(shell echo $$(($(UNITY) + 1)))
IS_GCC := $(findstring Free Software Foundation,$(shell $(CXX) --version 2> /dev/null))
# $(call unit,STEM,NUMBER,FILES). -MP gives no rule to the last file, which may be removed. GCC
# would warn of types from an anonymous namespace in a class of a .cpp file, as if it were a header.
define unit
$(1)-$(2).o: $(3) $(1).files $(B)/flags
	$$(call visibly,compile $(patsubst %/,%,$(dir $(lastword $(3)))): $(basename $(notdir $(3))), \
	    $$(COMPILE) $(if $(IS_GCC),-Wno-subobject-linkage) -MMD -MP -c -o $$@ \
	    $(addprefix -include ,$(wordlist 2,$(words $(3)),x $(3))) $(lastword $(3)) && \
	    echo '$(lastword $(3)):' >> $$(@:.o=.d))
$(if $(filter $(OF_JSON),$(3)),JSON_UNITS += $(1)-$(2).o)
endef
JSON_UNITS :=
# $(call units,STEM,FILES,COUNTED): the objects STEM-1.o, STEM-2.o, … of the files.
units = $(if $(2),$(eval $(call unit,$(1),$(words $(3) x),$(wordlist 1,$(UNITY),$(2)))) \
    $(1)-$(words $(3) x).o $(call units,$(1),$(wordlist $(AFTER_UNITY),$(words $(2)),$(2)),$(3) x))
# The same, made again where the list of files has changed.
listed_units = $(eval $(call stamp,$(1).files,$(UNITY): $(2)))$(call units,$(1),$(2))
in_folder = $(foreach file,$(2),$(if $(filter $(1),$(dir $(file))),$(file)))
# $(call objects,STEM,FILES): the objects of files that are all compiled with the same flags.
objects = $(patsubst %.cpp,$(O)/%.o,$(filter $(SINGLE),$(2))) \
    $(foreach folder,$(sort $(dir $(filter-out $(SINGLE),$(2)))), \
        $(call listed_units,$(O)/$(folder)$(1),$(call in_folder,$(folder), \
            $(filter-out $(SINGLE),$(2)))))

CONTROL_OBJECTS := $(call objects,control,$(filter $(CONTROL),$(SOURCES)))
# Objects compiled for MARCH come last: if an inline function is in several objects, the linker
# keeps the first one, which must run on every CPU.
MATHEMATICS_OBJECTS := $(MATHEMATICS:%.cpp=$(O)/%.o)
OBJECTS := $(call objects,unit,$(filter-out $(CONTROL) $(MATHEMATICS),$(SOURCES))) \
    $(CONTROL_OBJECTS) $(MATHEMATICS_OBJECTS)
ifeq ($(HAVE_CUDA),1)
OBJECTS += $(patsubst %,$(O)/%.o,$(CUDA_SOURCES))
endif
TEST_OBJECTS := $(call objects,unit,$(TEST_SOURCES))
COMPARE_OBJECTS := $(COMPARE_SOURCES:%.cpp=$(O)/%.o)

all: $(B)/train_gpt

$(B)/train_gpt: $(O)/train_gpt.o $(OBJECTS)
$(B)/test: $(TEST_OBJECTS) $(OBJECTS) $(B)/only
$(B)/bench: $(O)/test/bench.o $(OBJECTS)
$(B)/bench_tokenizer: $(O)/test/bench_tokenizer.o $(OBJECTS)
$(B)/compare: $(O)/test/compare.o $(COMPARE_OBJECTS) $(OBJECTS)
$(B)/test: LIBRARIES := $(if $(filter 3,$(CATCH2)),-lCatch2) $(LIBRARIES)
$(B)/train_gpt $(B)/test $(B)/bench $(B)/bench_tokenizer $(B)/compare: $(B)/flags
	$(call visibly,link $@,$(CXX) $(FLAGS) $(CXXFLAGS) $(LDFLAGS) $(filter %.o,$^) $(LIBRARIES) -o $@)

# A file takes up to a minute. $(call visibly,WHAT,COMMAND) says what is done, and every 10 s that
# it still lasts.
define visibly
	@mkdir -p $(@D)
	@echo "$(1)"
	@{ s=0; while sleep 10 > /dev/null 2>&1; do s=$$((s + 10)); echo "$(1): $$s s"; done; } & \
	    trap "kill $$!" EXIT; $(2)
endef

$(O)/%.o: %.cpp $(B)/flags
	$(call visibly,compile $<,$(COMPILE) -MMD -MP -c $< -o $@)

$(O)/%.cu.o: %.cu $(B)/flags
	$(call visibly,compile $<,$(NVCC) $(NVCC_FLAGS) $(DEFINES) $(CPPFLAGS) -MMD -MP \
	    -MF $(@:.o=.d) -c $< -o $@)

HOST_CUDA_OBJECTS := $(HOST_CUDA_SOURCES:%=$(O)/%.o)
$(HOST_CUDA_OBJECTS): $(O)/%.cu.o: %.cu $(B)/flags
	$(call visibly,compile $<,$(COMPILE) -MMD -MP -x c++ -c $< -o $@)

$(O)/train_gpt.o: train_gpt.cu $(B)/flags
	$(call visibly,compile $<,$(COMPILE) -MMD -MP -x c++ -c $< -o $@)

$(MATHEMATICS_OBJECTS): private FLAGS += $(KERNEL_FLAGS)
$(O)/tokenizer/%.o: private FLAGS += $(filter -O3,$(OPTIMISE:-O2=-O3))
$(O)/base/version.o: private CPPFLAGS += -DTRAIN_GPT_VERSION='"$(VERSION)"'
$(O)/base/version.o: $(B)/version
# Only one file includes cuDNN's headers. It loads the library at run time.
$(O)/kernels/attention/cudnn.o: private CPPFLAGS += $(if $(CUDNN_FRONTEND),-DTRAIN_GPT_CUDNN \
    -isystem $(CUDNN_FRONTEND) -isystem $(CUDNN_INCLUDE))
$(O)/kernels/attention/cudnn.o: $(B)/cudnn
# The same holds for NCCL. Only the files that connect ranks include MPI's headers.
$(O)/parallel/communicator_nccl.cu.o: private CPPFLAGS += $(if $(NCCL),-DTRAIN_GPT_NCCL \
    $(addprefix -isystem ,$(filter-out /usr/include,$(NCCL))))
$(O)/parallel/communicator_nccl.cu.o: $(B)/nccl
# Tests load this library in place of NCCL's, to see what is called.
ifneq ($(and $(filter 1,$(HAVE_CUDA)),$(NCCL)),)
$(B)/test: | $(B)/observed/libnccl.so.2
endif
$(B)/observed/libnccl.so.2: test/parallel/observed_nccl.cpp $(B)/flags $(B)/nccl
	$(call visibly,link $@,$(COMPILE) -O1 \
	    $(addprefix -isystem ,$(filter-out /usr/include,$(NCCL))) -fPIC -shared $< -o $@)
# Tests load these libraries: one sends a signal before main(), one makes disks and clocks faulty.
OF_TESTS := $(addprefix $(B)/observed/,early_signal.so faulty_machine.so)
$(B)/test: | $(OF_TESTS)
$(OF_TESTS): $(B)/observed/%.so: test/commands/%.cpp $(B)/flags
	$(call visibly,link $@,$(COMPILE) -fPIC -shared $< -o $@)
# The page of a report is written as HTML, CSS and JavaScript. Their texts are compiled into the
# program; the files of JavaScript are joined in this order.
PAGE_FILES := $(O)/training/report/page_files.h
$(PAGE_FILES): $(addprefix training/report/,page.html page.css page.js page_plot.js \
    page_sections.js)
	@mkdir -p $(@D)
	@for kind in html css js; do \
	    printf 'namespace train_gpt { constexpr const char* page_%s = R"page(' $$kind && \
	    cat $$(printf '%s\n' $^ | grep "\.$$kind$$") && printf ')page"; }\n' || exit; done > $@
LOOK_FILES := $(O)/training/look/look_files.h
$(LOOK_FILES): $(addprefix training/look/look.,html css js)
	@mkdir -p $(@D)
	@for kind in html css js; do \
	    printf 'namespace train_gpt { constexpr const char* look_%s = R"page(' $$kind && \
	    cat training/look/look.$$kind && printf ')page"; }\n' || exit; done > $@
$(PAGES:%.cpp=$(O)/%.o): private CPPFLAGS += -I$(O)
$(PAGES:%.cpp=$(O)/%.o) $(PAGES:%=lint/%): $(PAGE_FILES)
$(O)/training/look/look_page.o lint/training/look/look_page.cpp: $(LOOK_FILES)
MPI_OBJECTS := $(WITH_MPI:%.cpp=$(O)/%.o)
$(MPI_OBJECTS): private CPPFLAGS += $(if $(filter 1,$(HAVE_MPI)),$(MPI_INCLUDES))
$(MPI_OBJECTS): $(B)/mpi

# Only one file includes OpenSSL's headers, and a test.
TLS_OBJECTS := $(WITH_TLS:%.cpp=$(O)/%.o)
$(TLS_OBJECTS): private CPPFLAGS += $(if $(filter 1,$(HAVE_TLS)),-DTRAIN_GPT_TLS)
$(TLS_OBJECTS): $(B)/tls

# The same holds for the libraries that only Parquet needs.
CODEC_OBJECTS := $(WITH_CODECS:%.cpp=$(O)/%.o)
$(CODEC_OBJECTS): private CPPFLAGS += $(if $(filter 1,$(HAVE_SNAPPY)),-DTRAIN_GPT_SNAPPY) \
    $(if $(filter 1,$(HAVE_LZ4)),-DTRAIN_GPT_LZ4)
$(CODEC_OBJECTS): $(B)/codecs

READS_JSON := $(patsubst %,$(O)/%.o,$(basename $(OF_JSON))) $(JSON_UNITS)

# The compiler spends half of its time on headers that hardly change. GCC precompiles them once, for
# every file except those compiled for MARCH; other compilers read them each time. A build with
# PRECOMPILE=0 UNITY=0 and `make lint` find missing #includes.
PRECOMPILED := $(O)/precompiled
ifneq ($(and $(filter-out 0,$(PRECOMPILE)),$(IS_GCC)),)
$(PRECOMPILED)/standard.h: INCLUDES := $(STANDARD:%=<%>)
$(PRECOMPILED)/json.h: INCLUDES := $(STANDARD:%=<%>) <nlohmann/json.hpp>
$(PRECOMPILED)/catch.h: INCLUDES := $(STANDARD:%=<%>) "test/catch.h"
$(PRECOMPILED)/%.h: $(B)/flags
	@mkdir -p $(@D)
	@printf '#include %s\n' $(foreach header,$(INCLUDES),'$(header)') > $@
$(PRECOMPILED)/%.h.gch: $(PRECOMPILED)/%.h
	$(call visibly,compile headers: $*,$(COMPILE) -MMD -MP -MF $(PRECOMPILED)/$*.d \
	    -x c++-header -c $< -o $@)
.SECONDARY: $(PRECOMPILED)/standard.h $(PRECOMPILED)/json.h $(PRECOMPILED)/catch.h

# $(call precompile,OBJECTS,HEADER)
define precompile
$(1): private CPPFLAGS += -include $(PRECOMPILED)/$(2).h
$(1): $(PRECOMPILED)/$(2).h.gch
endef
$(eval $(call precompile,$(filter-out %/main.o $(COMPARE_OBJECTS),$(TEST_OBJECTS)),catch))
$(eval $(call precompile,$(READS_JSON),json))
$(eval $(call precompile,$(filter-out $(READS_JSON) $(MATHEMATICS_OBJECTS) %.cu.o, \
    $(O)/train_gpt.o $(OBJECTS)) $(HOST_CUDA_OBJECTS),standard))
endif
ifeq ($(VARIANT),)
$(CONTROL_OBJECTS) $(filter-out %/kernels/reference.o,$(TEST_OBJECTS)) $(O)/test/compare.o \
    $(O)/train_gpt.o: private FLAGS += -O1
endif

-include $(OBJECTS:.o=.d) $(TEST_OBJECTS:.o=.d) $(O)/train_gpt.d \
    $(addprefix $(O)/test/,bench.d bench_tokenizer.d compare.d) $(wildcard $(PRECOMPILED)/*.d)

# --- Targets --------------------------------------------------------------------------------------

.PHONY: all setup quickstart test run-tests test-full gpu-check fuzz bench compare format lint \
    install bundle clean help FORCE has-clang-format has-clang-tidy

# `make -n` runs recipes that contain $(MAKE). Scripts cannot say what they would do, so they are
# only echoed.
DRY_RUN = $(if $(findstring n,$(firstword -$(MAKEFLAGS))),echo)

setup:
	@scripts/setup.sh

# Values are taken as typed, since names of files may have any characters.
quickstart: override export DATA := $(value DATA)
quickstart: override export FIELD := $(value FIELD)
quickstart: override export STEPS := $(value STEPS)
quickstart:
	@MAKE='$(MAKE)' $(DRY_RUN) scripts/quickstart.sh

ifneq ($(filter run-tests $(B)/test,$(MAKECMDGOALS)),)
ifeq ($(CATCH2),)
$(B)/test: test-needs-catch2
.PHONY: test-needs-catch2
test-needs-catch2:
	@echo 'error: the tests need Catch2; install it with: scripts/setup.sh test' >&2; exit 1
$(filter-out $(COMPARE_OBJECTS),$(TEST_OBJECTS)) $(PRECOMPILED)/catch.h.gch: | test-needs-catch2
endif
endif

# Installs missing packages first. The last line that it prints is "N passed, M failed" (test
# cases).
test:
	@GPUSIM='$(GPUSIM)' scripts/setup.sh build test
	@$(MAKE) --no-print-directory run-tests

# The simulator is a library that replaces the CUDA runtime and runs kernels on the CPU; the loader
# finds it before the real one. Tests train only small models with it. A machine with a GPU does not
# need it.
SIMULATOR := $(if $(GPUSIM),build/gpusim)
.PHONY: simulator
simulator:
	@$(MAKE) --no-print-directory -C $(GPUSIM) BUILD=$(abspath $(SIMULATOR)) \
	    LIBDIR=$(abspath $(SIMULATOR)/lib) CUDA=$(CUDA_PATH) > $(SIMULATOR).log 2>&1 || \
	    { tail -n 20 $(SIMULATOR).log >&2; exit 1; }

run-tests: $(B)/train_gpt $(B)/compare $(B)/test $(if $(GPUSIM),simulator)
	@$(if $(filter 1,$(HAVE_ONEDNN)),,echo 'skipped: matrix products through oneDNN,' \
	    'which was not found; our own kernel is tested';) \
	 $(if $(filter 1,$(HAVE_CUDA)),,echo 'skipped: GPU kernels, which need nvcc to build';) \
	 $(if $(TEST_ARGS),,echo 'skipped: long cases and sanitizers, which make test-full runs';) \
	 $(if $(and $(filter 1,$(HAVE_CUDA)),$(if $(GPUSIM),,1)),nvidia-smi > /dev/null 2>&1 || \
	    echo 'skipped: GPU kernels without a GPU (GPUSIM=folder simulates one)';) \
	 GPUSIM='$(if $(GPUSIM),$(abspath $(SIMULATOR)/lib))' MEMCHECK='$(MEMCHECK)' \
	    TRAIN_GPT=$(B)/train_gpt COMPARE=$(B)/compare scripts/run-tests.sh $(B)/test $(TEST_ARGS)

test-full:
	@MAKE='$(MAKE)' GPUSIM='$(GPUSIM)' $(DRY_RUN) scripts/test-full.sh

# The script builds the programs, if there is a GPU to run them on. GPU_CHECK_ARGS: its arguments.
gpu-check: $(if $(GPUSIM),simulator)
	@MAKE='$(MAKE)' GPUSIM='$(if $(GPUSIM),$(abspath $(SIMULATOR)/lib))' $(DRY_RUN) \
	    scripts/first_hour.sh $(GPU_CHECK_ARGS)

# File readers under libFuzzer, which comes with clang. They do not use OpenMP, since clang may lack
# it.
FUZZ := build/fuzz
FUZZ_SOURCES := $(wildcard tokenizer/*.cpp dataloader/*.cpp dataloader/parquet/*.cpp) \
    $(addprefix training/config/,config.cpp config_keys.cpp model_keys.cpp config_parser.cpp \
        config_text.cpp json_mistake.cpp key_values.cpp known_data.cpp load_config.cpp \
        nearest_key.cpp) training/files/safetensors.cpp \
    $(addprefix training/evaluations/,python_random.cpp python_text.cpp task_file.cpp \
        task_tokens.cpp) \
    model/registry.cpp model/spec.cpp $(wildcard model/families/*.cpp) \
    parallel/state/parameter.cpp \
    $(addprefix base/,crc32.cpp error.cpp file.cpp hash.cpp hub_files.cpp json_file.cpp \
        json_text.cpp mapped_pages.cpp path.cpp printable.cpp stopwatch.cpp terminal_text.cpp \
        text_table.cpp utf8.cpp) \
    test/fuzz/targets.cpp test/fuzz/fuzz.cpp
FUZZ_OBJECTS := $(addprefix $(FUZZ)/,$(FUZZ_SOURCES:.cpp=.o))
# Parquet is also fuzzed with the codecs that are here.
FUZZ_CODECS := $(foreach codec,zlib:z:ZLIB zstd:zstd:ZSTD snappy-c:snappy:SNAPPY lz4:lz4:LZ4, \
    $(if $(wildcard /usr/include/$(firstword $(subst :, ,$(codec))).h),$(codec)))
FUZZ_DEFINES := $(foreach codec,$(FUZZ_CODECS),-DTRAIN_GPT_$(lastword $(subst :, ,$(codec))))
FUZZ_LIBRARIES := $(foreach codec,$(FUZZ_CODECS),-l$(word 2,$(subst :, ,$(codec))))
FUZZ_FLAGS := -std=c++20 -O1 -g -Wall -Wextra -fno-omit-frame-pointer -fno-sanitize-recover=all
$(FUZZ)/fuzz: $(FUZZ_OBJECTS)
	@echo "link $@"
	@clang++ $(FUZZ_FLAGS) -fsanitize=fuzzer,address,undefined $^ -lxxhash -lpcre2-8 -lutf8proc \
	    $(FUZZ_LIBRARIES) -lpthread -o $@
$(FUZZ)/%.o: %.cpp
	@mkdir -p $(@D)
	@echo "compile $<"
	@clang++ -I. $(FUZZ_FLAGS) $(FUZZ_DEFINES) -fsanitize=fuzzer-no-link,address,undefined \
	    -MMD -MP -c $< -o $@
-include $(FUZZ_OBJECTS:.o=.d)

fuzz:
	@MAKE='$(MAKE)' FUZZ_SECONDS='$(FUZZ_SECONDS)' FUZZ_TARGETS='$(FUZZ_TARGETS)' \
	    $(DRY_RUN) scripts/fuzz.sh

bench: $(B)/train_gpt $(B)/bench $(B)/bench_tokenizer
	@BUILD=$(B) scripts/bench.sh

compare: $(B)/compare

format: | has-clang-format
	clang-format -i train_gpt.cu $(SOURCES) $(CUDA_SOURCES) $(TEST_SOURCES) $(PROGRAMS) $(HEADERS)

# clang-tidy uses omp.h of the C++ compiler, but its own intrinsics.
LINTED := $(addprefix lint/,train_gpt.cu $(SOURCES) $(TEST_SOURCES) test/compare.cpp)
LINTED_CUDA := $(addprefix lint/,$(CUDA_SOURCES))
LINTED_PTX := $(if $(and $(filter 1,$(HAVE_CUDA)),$(GPUSIM)),$(addprefix lint-registers/, \
    $(filter-out $(HOST_CUDA_SOURCES),$(CUDA_SOURCES))))
.PHONY: $(LINTED) $(LINTED_CUDA) $(LINTED_PTX) lint-layers lint-scripts lint-faults \
    lint-registers lint-hopper
lint: $(LINTED) $(LINTED_CUDA) lint-layers lint-scripts lint-faults lint-registers lint-hopper
lint-layers:
	@scripts/check-layers.sh
lint-faults:
	@scripts/mutants.sh --check
lint-scripts:
	@if command -v shellcheck > /dev/null; then \
	    shellcheck -x -S warning .ci/run $(wildcard scripts/*.sh scripts/*/*.sh); \
	else \
	    echo 'skipped: shellcheck, which is not installed'; \
	fi
	@if command -v ruff > /dev/null; then \
	    ruff check -q --select E9,F scripts; \
	else \
	    echo 'skipped: ruff, which is not installed'; \
	fi
$(LINTED): lint/%: % | has-clang-tidy
	@echo "lint $<"
	@clang-tidy --quiet $< -- -x c++ $(DEFINES) -I$(O) $(MPI_INCLUDES) \
	    $(filter-out -Werror -Wno-restrict -Wno-maybe-uninitialized,$(FLAGS)) \
	    -idirafter $(shell $(CXX) -print-file-name=include) \
	    $(if $(filter kernels/%,$<),$(KERNEL_FLAGS)) 2>&1 | sed '/warnings\{0,1\} generated/d'

# Few versions of clang can read CUDA 13's headers, so .cu files and the .cuh files that they
# include are checked by nvcc's warnings.
$(LINTED_CUDA): lint/%: %
ifeq ($(HAVE_CUDA),1)
	@echo "lint $<"
	@$(NVCC) $(filter-out -O3 -lineinfo,$(NVCC_FLAGS)) -Werror all-warnings \
	    -Xcompiler -Werror,-Wshadow $(DEFINES) $(CPPFLAGS) -o /dev/null -c $<
else
	@echo "skipped: $<, without nvcc"
endif

# Registers that a path of a kernel reads before it writes them. The simulator's folder has the
# tool. CUB's kernels are not ours.
lint-registers: $(LINTED_PTX)
	@$(if $(LINTED_PTX),,echo 'skipped: unwritten registers of kernels,' \
	    'which needs nvcc and GPUSIM=folder of the simulator')
$(LINTED_PTX): lint-registers/%: %
	@echo "lint registers of $<"
	@mkdir -p $(B)/ptx/$(@D)
	@$(NVCC) $(filter-out -gencode arch=%,$(NVCC_FLAGS)) $(DEFINES) $(CPPFLAGS) \
	    -ptx -o $(B)/ptx/$@.ptx $< \
	    $(if $(filter $(O)/$<.o,$(SM90A_OBJECTS)),-arch=compute_90a -DTRAIN_GPT_SM90A,-arch=compute_90)
	@python3 $(GPUSIM)/tools/undefined_registers.py --same-predicate --allow 'cub::' $(B)/ptx/$@.ptx

# Registers, spills and shared memory of the kernels for sm_90a, and with nvdisasm waits for their
# products, and fences.
lint-hopper:
ifeq ($(HAVE_CUDA),1)
	@echo 'lint kernels for sm_90a'
	@scripts/kernel_report.py --hopper --nvcc $(NVCC) > /dev/null
else
	@echo 'skipped: kernels for sm_90a, without nvcc'
endif

has-clang-format has-clang-tidy: has-%:
	@command -v $* > /dev/null || { \
	    echo 'error: there is no $*; on Debian and Ubuntu: apt-get install $*' >&2; exit 1; }

install: $(B)/train_gpt
	install -D -m 755 $(B)/train_gpt $(DESTDIR)$(PREFIX)/bin/train_gpt
	install -d $(addprefix $(DESTDIR)$(PREFIX)/share/train_gpt/,configs/clusters scripts)
	install -m 644 configs/*.json $(DESTDIR)$(PREFIX)/share/train_gpt/configs
	install -m 644 configs/clusters/*.json $(DESTDIR)$(PREFIX)/share/train_gpt/configs/clusters
	install -m 755 scripts/data.sh scripts/tasks.py $(DESTDIR)$(PREFIX)/share/train_gpt/scripts
	install -d $(addprefix $(DESTDIR)$(PREFIX)/share/,man/man1 bash-completion/completions \
	    zsh/site-functions fish/vendor_completions.d)
	$(B)/train_gpt --man > $(DESTDIR)$(PREFIX)/share/man/man1/train_gpt.1
	$(B)/train_gpt completion bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/train_gpt
	$(B)/train_gpt completion zsh > $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_train_gpt
	$(B)/train_gpt completion fish > $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/train_gpt.fish
	@echo 'configs/ and scripts/ that the program names are in $(PREFIX)/share/train_gpt'

# For nodes without packages: for every GPU from sm_80 on and for CPUs with AVX2.
BUNDLED := $(addprefix build/portable/,train_gpt $(if $(filter-out 0,$(TESTS)),test compare))
bundle:
	@$(MAKE) --no-print-directory VARIANT=portable MARCH=x86-64-v3 MPI=0 ONEDNN=0 \
	    GPU_ARCHS='$(or $(GPU_ARCHS),all)' $(BUNDLED)
	@CUDA_LIBRARIES=$(CUDA_PATH)/lib64 scripts/bundle.sh build/bundle $(BUNDLED)

clean:
	rm -rf build

help:
	@echo 'make             builds build/train_gpt'
	@echo 'make quickstart  installs missing packages, builds, prepares a text, trains on it and' \
	    'shows the result (DATA=my.txt)'
	@echo 'make setup       installs missing packages'
	@echo 'make test        installs missing packages, builds, and runs the tests that this machine' \
	    'can run'
	@echo 'make test-full   also runs the long tests, sanitizers, fuzzing and deliberate faults'
	@echo 'make gpu-check   tests and measures on a GPU within 75 minutes, and reports which' \
	    'targets are met (scripts/first_hour.sh --help)'
	@echo 'make fuzz        fuzzes the file readers with libFuzzer, FUZZ_SECONDS each' \
	    '(now $(FUZZ_SECONDS))'
	@echo 'make bench       compares speed and memory with PyTorch, and the tokenizer with' \
	    'tokenizers and tiktoken'
	@echo 'make compare     builds build/compare, which compares results and speed of the kernels;' \
	    'it has --help'
	@echo 'make format      formats the sources with clang-format'
	@echo 'make lint        runs clang-tidy and checks the layers of includes; runs shellcheck and' \
	    'ruff on the scripts'
	@echo 'make install     copies the program, its configurations and scripts for data to PREFIX' \
	    '(now $(PREFIX)), below DESTDIR'
	@echo 'make bundle      puts the program and its libraries into build/bundle, which can be' \
	    'copied to other machines'
	@echo 'make clean       removes build/'
	@echo
	@sed -n '1,2d;/^#/!q;s/^# \{0,1\}//p' Makefile
