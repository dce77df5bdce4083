package recording

import (
	"strings"
	"testing"
)

func TestShortFrame(t *testing.T) {
	for text, want := range map[string]string{
		// Python.
		"forward /opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py:1790": "forward torch/nn/modules/module.py:1790",
		"step.<locals>.<listcomp> train.py:12":                                           "step.<locals>.<listcomp> train.py:12",
		"<module> /srv/me/job.py:3":                                                      "<module> /srv/me/job.py:3",
		"train /srv/somebody/a/long/way/from/here/train.py:12":                           "train .../here/train.py:12",
		"Thread.run /usr/lib/python3.12/threading.py:982":                                "Thread.run threading.py:982",
		"_find_and_load <frozen importlib._bootstrap>:1176":                              "_find_and_load <frozen importlib._bootstrap>:1176",
		"f <string>:1": "f <string>:1",
		"f " + strings.Repeat("x", 300) + ".py:12": "f ..." + strings.Repeat("x", 90) + ".py:12",
		// C++.
		"c10::cuda::CUDACachingAllocator::Native::(anonymous namespace)::ExpandableSegment::map(c10::cuda::SegmentRange) /opt/torch/lib/libc10_cuda.so": "c10::cuda::CUDACachingAllocator::Native::(anonymous namespace)::ExpandableSegment::map libc10_cuda.so",
		"void at::native::gpu_kernel<at::native::FillFunctor<c10::Half> >(at::TensorIteratorBase&, at::native::FillFunctor<c10::Half> const&)":          "at::native::gpu_kernel<...>",
		"at::Tensor at::ops::empty<float>(int, long) const": "at::ops::empty<float>",
		"at::native::empty_cuda(c10::ArrayRef<long>, std::optional<c10::ScalarType>) /pytorch/aten/src/ATen/native/cuda/TensorFactories.cpp:12": "at::native::empty_cuda .../cuda/TensorFactories.cpp:12",
		"f(int)::{lambda(int, long)#1}::operator()(int, long) const":                                                                            "f::{lambda#1}::operator()",
		"ns::operator<<(std::ostream&, X const&)":                                                                                               "ns::operator<<",
		"operator new(unsigned long)":                                                                                                           "operator new",
		"X::operator bool() const":                                                                                                              "X::operator bool",
		"X::operator->() /lib/libx.so.1":                                                                                                        "X::operator-> libx.so.1",
		"std::function<void (int)>::operator()(int) const":                                                                                      "std::function<void >::operator()",
		"f(int) [clone .isra.0]":                                                                                                                "f",
		// Rust.
		"<alloc::vec::Vec<T,A> as core::ops::drop::Drop>::drop /lib/librust.so": "<alloc::vec::Vec<T,A> as core::ops::drop::Drop>::drop librust.so",
		"core::ptr::drop_in_place<alloc::vec::Vec<alloc::string::String>>":      "core::ptr::drop_in_place<alloc::vec::Vec<...>>",
		// Libraries without names.
		"libcudart.so.13+0x41b5d /opt/site-packages/torch/lib/../../nvidia/cu13/lib/libcudart.so.13": "libcudart.so.13+0x41b5d",
		"cuMemAlloc_v2 /lib/x86_64-linux-gnu/libcuda.so.1":                                           "cuMemAlloc_v2 libcuda.so.1",
		"main /srv/me/program": "main /srv/me/program",
		// What is no frame.
		"no stack was recorded": "no stack was recorded", "": "", "?": "?", "a(b<c)": "a(b<c)", "f(": "f(", ")": ")", "->": "->", "{": "{", "operator": "operator",
	} {
		if got := ShortFrame(text); got != want {
			t.Errorf("%s:\n%s, want\n%s", text, got, want)
		}
	}
}

func FuzzShortFrame(f *testing.F) {
	f.Add("void a::b<c>(d<e> const&) const /lib/libx.so")
	f.Add("operator()(")
	f.Fuzz(func(t *testing.T, text string) {
		if got := ShortFrame(text); len(got) > len(text)+16 {
			t.Errorf("%q becomes %q", text, got)
		}
	})
}

// TestLibraryOfDetours: a library that was loaded by a path with detours is where that leads, and each of NVIDIA's is one.
func TestLibraryOfDetours(t *testing.T) {
	const packages = "/opt/venv/lib/python3.12/site-packages/"
	for file, want := range map[string]string{
		packages + "torch/lib/../../nvidia/cu13/lib/libcudart.so.13": "cudart",
		packages + "nvidia/cudnn/lib/libcudnn_graph.so.9":            "cudnn_graph",
		packages + "nvidia/__init__.py":                              "nvidia",
		packages + "torch/lib/libc10_cuda.so":                        "torch",
		"../job/../train.py":                                         OwnCode,
	} {
		if got := (Frame{Func: "f", File: file}).Library(); got != want {
			t.Errorf("%s: %s, want %s", file, got, want)
		}
	}
	// What lies between a program and its memory says less than the caller.
	frames := []Frame{{Func: "libcudart.so.13+0x1", File: packages + "torch/lib/../../nvidia/cu13/lib/libcudart.so.13"},
		{Func: "c10::f()", File: packages + "torch/lib/libc10_cuda.so"}, {Func: "train", File: "/srv/me/train.py", Line: 3}}
	if at := Telling(frames); at != 2 {
		t.Errorf("frame %d says most", at)
	}
	if strings.Contains(ShortFrame(frames[0].String()), "/") {
		t.Error(ShortFrame(frames[0].String()))
	}
}

func TestLayerOf(t *testing.T) {
	for text, want := range map[string]Layer{
		"train /srv/me/train.py:12": LayerOwn,
		"train train.py:12":         LayerOwn,
		"main":                      LayerLibrary, // without a file it is unknown
		"forward /opt/venv/lib/python3.12/site-packages/transformers/models/gpt2/modeling_gpt2.py:185": LayerLibrary,
		"_call_impl /opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py:1790":            LayerFramework,
		"Thread.run /usr/lib/python3.12/threading.py:982":                                              LayerFramework,
		"_find_and_load <frozen importlib._bootstrap>:1176":                                            LayerFramework,
		"at::native::empty_cuda(long) /opt/torch/lib/libtorch_cuda.so":                                 LayerFramework,
		"at::empty(long) /pytorch/aten/src/ATen/Functions.cpp:12":                                      LayerFramework,
		"ncclCommInitRank /usr/lib/libnccl.so.2":                                                       LayerLibrary,
	} {
		if got := LayerOf(text); got != want {
			t.Errorf("%s is of layer %d, want %d", text, got, want)
		}
	}
}
