// A Rust program to be traced: four threads allocate 3 MiB and 1 MiB each and free the first. The driver's functions are
// linked, or with --cfg looked_up found by dlsym in the library that STANDIN names.

#[cfg(not(looked_up))]
mod cuda {
    unsafe extern "C" {
        pub fn cuInit(flags: u32) -> i32;
        pub fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) -> i32;
        #[link_name = "cuCtxPushCurrent_v2"]
        pub fn push(context: usize) -> i32;
        #[link_name = "cuMemAlloc_v2"]
        pub fn alloc(p: *mut u64, size: usize) -> i32;
        #[link_name = "cuMemFree_v2"]
        pub fn free(p: u64) -> i32;
    }
}

#[cfg(looked_up)]
mod cuda {
    use std::ffi::{c_char, c_int, c_void, CString};
    use std::mem::transmute;
    unsafe extern "C" {
        fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
        fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    }
    unsafe fn find(name: &str) -> *mut c_void {
        let file = CString::new(std::env::var("STANDIN").unwrap()).unwrap();
        let name = CString::new(name).unwrap();
        let f = unsafe { dlsym(dlopen(file.as_ptr(), 2), name.as_ptr()) };
        assert!(!f.is_null());
        f
    }
    #[allow(non_snake_case)]
    pub unsafe fn cuInit(flags: u32) -> i32 {
        unsafe { transmute::<_, extern "C" fn(u32) -> i32>(find("cuInit"))(flags) }
    }
    #[allow(non_snake_case)]
    pub unsafe fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) -> i32 {
        unsafe { transmute::<_, extern "C" fn(*mut usize, i32) -> i32>(find("cuDevicePrimaryCtxRetain"))(context, device) }
    }
    pub unsafe fn push(context: usize) -> i32 {
        unsafe { transmute::<_, extern "C" fn(usize) -> i32>(find("cuCtxPushCurrent_v2"))(context) }
    }
    pub unsafe fn alloc(p: *mut u64, size: usize) -> i32 {
        unsafe { transmute::<_, extern "C" fn(*mut u64, usize) -> i32>(find("cuMemAlloc_v2"))(p, size) }
    }
    pub unsafe fn free(p: u64) -> i32 {
        unsafe { transmute::<_, extern "C" fn(u64) -> i32>(find("cuMemFree_v2"))(p) }
    }
}

fn work(context: usize) {
    let (mut first, mut second) = (0u64, 0u64);
    unsafe {
        assert_eq!(cuda::push(context), 0);
        assert_eq!(cuda::alloc(&mut first, 3 << 20), 0);
        assert_eq!(cuda::alloc(&mut second, 1 << 20), 0);
        assert_eq!(cuda::free(first), 0);
    }
}

fn main() {
    let mut context = 0usize;
    unsafe {
        assert_eq!(cuda::cuInit(0), 0);
        assert_eq!(cuda::cuDevicePrimaryCtxRetain(&mut context, 0), 0);
    }
    let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(move || work(context))).collect();
    for t in threads {
        t.join().unwrap();
    }
    println!("four threads");
    let caught = std::panic::catch_unwind(|| panic!("unwinding"));
    std::process::exit(if caught.is_err() { 5 } else { 6 });
}
