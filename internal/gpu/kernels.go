package gpu

import "strings"

// The kernels, in PTX by hand: the driver compiles it for whatever GPU it finds (sm_70, Volta, or newer), and no CUDA
// compiler is needed. Every parameter is 8 bytes wide.
const (
	ptxVersion = "7.0" // CUDA 11.0, the oldest driver with everything the engine needs
	ptxTarget  = "sm_70"
)

// ptxWord sets %word to Word(seed, %i), where %key is mix(seed): the same steps as mix in pattern.go.
const ptxWord = `
	mul.lo.u64	%t, %i, 0x9E3779B97F4A7C15;
	add.u64		%word, %key, %t;
	shr.u64		%t, %word, 30;
	xor.b64		%word, %word, %t;
	mul.lo.u64	%word, %word, 0xBF58476D1CE4E5B9;
	shr.u64		%t, %word, 27;
	xor.b64		%word, %word, %t;
	mul.lo.u64	%word, %word, 0x94D049BB133111EB;
	shr.u64		%t, %word, 31;
	xor.b64		%word, %word, %t;
`

// ptxGrid loads the range and gives each thread the words %i, %i+%stride, …. The word behind the last whole one stands
// for the 0 to 7 bytes that are left.
const ptxGrid = `
	ld.param.u64	%base, [p_base];
	ld.param.u64	%bytes, [p_bytes];
	ld.param.u64	%key, [p_key];
	cvta.to.global.u64	%base, %base;
	shr.u64		%words, %bytes, 3;
	and.b64		%rest, %bytes, 7;
	mov.u32		%block, %ctaid.x;
	mov.u32		%width, %ntid.x;
	mov.u32		%thread, %tid.x;
	mov.u32		%blocks, %nctaid.x;
	cvt.u64.u32	%i, %thread;
	mad.wide.u32	%i, %block, %width, %i;
	mul.wide.u32	%stride, %blocks, %width;
`

const ptxRegisters = `
	.reg .pred	%done, %last, %same;
	.reg .b32	%block, %width, %thread, %blocks;
	.reg .b64	%base, %bytes, %key, %words, %rest, %i, %stride, %word, %t, %at, %found, %bad, %counter;
`

// ptx is the module.
//
// spin keeps one multiprocessor busy for p_ns nanoseconds of the GPU's wall clock.
//
// fill writes the pattern over p_bytes bytes at p_base, 8-byte aligned.
//
// check compares the same range with the pattern and adds the number of words that differ (the rest behind the last
// whole word counting as one each byte) to the 64-bit counter at p_counter.
var ptx = strings.NewReplacer("@WORD@", ptxWord, "@GRID@", ptxGrid, "@REGISTERS@", ptxRegisters).Replace(`
.version ` + ptxVersion + `
.target ` + ptxTarget + `
.address_size 64

.visible .entry spin(.param .u64 p_ns)
{
	.reg .pred	%more;
	.reg .b64	%start, %now, %ns;

	ld.param.u64	%ns, [p_ns];
	mov.u64		%start, %globaltimer;
again:
	nanosleep.u32	500;
	mov.u64		%now, %globaltimer;
	sub.u64		%now, %now, %start;
	setp.lt.u64	%more, %now, %ns;
	@%more bra	again;
	ret;
}

.visible .entry fill(.param .u64 p_base, .param .u64 p_bytes, .param .u64 p_key)
{
@REGISTERS@
@GRID@
next:
	setp.ge.u64	%done, %i, %words;
	@%done bra	tail;
@WORD@
	shl.b64		%at, %i, 3;
	add.u64		%at, %base, %at;
	st.global.u64	[%at], %word;
	add.u64		%i, %i, %stride;
	bra		next;
tail:
	setp.ne.u64	%last, %i, %words;
	@%last bra	end;
@WORD@
	shl.b64		%at, %i, 3;
	add.u64		%at, %base, %at;
byte:
	setp.eq.u64	%done, %rest, 0;
	@%done bra	end;
	st.global.u8	[%at], %word;
	shr.u64		%word, %word, 8;
	add.u64		%at, %at, 1;
	sub.u64		%rest, %rest, 1;
	bra		byte;
end:
	ret;
}

.visible .entry check(.param .u64 p_base, .param .u64 p_bytes, .param .u64 p_key, .param .u64 p_counter)
{
@REGISTERS@
@GRID@
	ld.param.u64	%counter, [p_counter];
	cvta.to.global.u64	%counter, %counter;
	mov.u64		%bad, 0;
next:
	setp.ge.u64	%done, %i, %words;
	@%done bra	tail;
@WORD@
	shl.b64		%at, %i, 3;
	add.u64		%at, %base, %at;
	ld.global.u64	%found, [%at];
	setp.eq.u64	%same, %found, %word;
	@%same bra	good;
	add.u64		%bad, %bad, 1;
good:
	add.u64		%i, %i, %stride;
	bra		next;
tail:
	setp.ne.u64	%last, %i, %words;
	@%last bra	end;
@WORD@
	shl.b64		%at, %i, 3;
	add.u64		%at, %base, %at;
byte:
	setp.eq.u64	%done, %rest, 0;
	@%done bra	end;
	ld.global.u8	%found, [%at];
	and.b64		%t, %word, 255;
	setp.eq.u64	%same, %found, %t;
	@%same bra	goodbyte;
	add.u64		%bad, %bad, 1;
goodbyte:
	shr.u64		%word, %word, 8;
	add.u64		%at, %at, 1;
	sub.u64		%rest, %rest, 1;
	bra		byte;
end:
	setp.eq.u64	%same, %bad, 0;
	@%same bra	out;
	red.global.add.u64	[%counter], %bad;
out:
	ret;
}
`)
