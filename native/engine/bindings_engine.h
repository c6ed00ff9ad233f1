// bindings_engine.h: what the files of penstock.engine._native share.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "errors.h"

namespace penstock::engine {

namespace nb = nanobind;

template <class Element, class... Shape>
using Array = nb::ndarray<const Element, Shape..., nb::c_contig, nb::device::cpu>;
using Int32Array = Array<i32, nb::ndim<1>>;
using Int64Array = Array<i64, nb::ndim<1>>;

void bind_block_cache(nb::module_& m);
void bind_chunk_sender(nb::module_& m);
void bind_decoder_layer(nb::module_& m);
void bind_fatal_signals(nb::module_& m);
void bind_file_mapping(nb::module_& m);
void bind_packed_linear(nb::module_& m);
void bind_paged_attention(nb::module_& m);
void bind_pixels(nb::module_& m);
void bind_rank_memory(nb::module_& m);
void bind_rms_norm(nb::module_& m);
void bind_rotary(nb::module_& m);
void bind_table_writer(nb::module_& m);
void bind_token_choice(nb::module_& m);

}  // namespace penstock::engine
