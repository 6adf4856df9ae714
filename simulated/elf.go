// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
)

// export is a function of a shared object that does nothing but return: a number, or the address of a text.
type export struct {
	name string
	code uint16
	text string
}

// dataOffset is the distance in memory between the part that is executed and the part that the loader writes to: the
// largest page size in use (64 KiB on arm64).
const dataOffset = 0x10000

// sharedObject is a shared library for Linux that can be loaded and has a SONAME, and no more than that: ldconfig and nvcdi
// file it under its name, and programs that load it find the exports. The layout is the ELF specification's, with the
// tables in the order in which they are written here.
func sharedObject(architecture, soname string, exports []export) []byte {
	o := object{machine: elf.EM_X86_64, strings: []byte{0}}
	if architecture == "arm64" {
		o.machine = elf.EM_AARCH64
	}
	sonameAt := o.intern(soname)
	names := make([]uint32, len(exports))
	for i, e := range exports {
		names[i] = o.intern(e.name)
	}
	o.reserve(64 + 4*56) // file header, four program headers
	hash := o.put(hashTable(len(exports)))
	code, at := o.code(exports)
	text := o.put(code)
	symbols := o.put(symbolTable(names, at, text))
	strings := o.put(o.strings)
	readable := uint64(o.out.Len())
	o.align()
	dynamic := o.put(words(
		uint64(elf.DT_SONAME), uint64(sonameAt),
		uint64(elf.DT_HASH), hash, uint64(elf.DT_SYMTAB), symbols, uint64(elf.DT_STRTAB), strings,
		uint64(elf.DT_STRSZ), uint64(len(o.strings)), uint64(elf.DT_SYMENT), 24,
		uint64(elf.DT_NULL), 0,
	))
	size := uint64(o.out.Len()) - dynamic
	sections := o.sections(dynamic, size, strings, symbols, uint64(24*(len(exports)+1)))
	o.header(readable, dynamic, size, sections)
	return o.out.Bytes()
}

// object is a shared object while it is written.
type object struct {
	machine elf.Machine
	strings []byte
	out     bytes.Buffer
}

func (o *object) intern(text string) uint32 {
	at := len(o.strings)
	o.strings = append(append(o.strings, text...), 0)
	return uint32(at)
}

func (o *object) reserve(size int) { o.out.Write(make([]byte, size)) }

func (o *object) align() { o.reserve(-o.out.Len() & 7) }

// put writes a table at the next multiple of eight and returns where that is.
func (o *object) put(data []byte) uint64 {
	o.align()
	at := o.out.Len()
	o.out.Write(data)
	return uint64(at)
}

func words(values ...uint64) []byte {
	var out []byte
	for _, v := range values {
		out = binary.LittleEndian.AppendUint64(out, v)
	}
	return out
}

// hashTable has one bucket, in which all symbols are chained.
func hashTable(exports int) []byte {
	first := uint32(0)
	if exports > 0 {
		first = 1
	}
	table := []uint32{1, uint32(exports + 1), first, 0}
	for i := 1; i <= exports; i++ {
		table = append(table, uint32((i+1)%(exports+1)))
	}
	var out []byte
	for _, v := range table {
		out = binary.LittleEndian.AppendUint32(out, v)
	}
	return out
}

// code is the functions, 16 bytes each, and behind them the texts; at holds where each function begins.
func (o *object) code(exports []export) (code []byte, at []uint64) {
	texts := len(exports) * 16
	var tail []byte
	for i, e := range exports {
		body := o.returnNumber(e.code)
		if e.text != "" {
			body = o.returnAddress(texts + len(tail) - i*16)
			tail = append(append(tail, e.text...), 0)
		}
		at = append(at, uint64(len(code)))
		code = append(code, append(body, make([]byte, 16-len(body))...)...)
	}
	return append(code, tail...), at
}

func (o *object) returnNumber(code uint16) []byte {
	if o.machine == elf.EM_AARCH64 { // mov w0, #code; ret
		return instructions(0x52800000|uint32(code)<<5, 0xd65f03c0)
	}
	return append(binary.LittleEndian.AppendUint32([]byte{0xb8}, uint32(code)), 0xc3) // mov eax, code; ret
}

// returnAddress returns the address that lies distance bytes behind the function's own.
func (o *object) returnAddress(distance int) []byte {
	if o.machine == elf.EM_AARCH64 { // adr x0, distance; ret
		return instructions(0x10000000|uint32(distance&3)<<29|uint32(distance>>2)<<5, 0xd65f03c0)
	}
	const length = 7 // lea rax, [rip + distance], counted from behind it; ret
	return append(binary.LittleEndian.AppendUint32([]byte{0x48, 0x8d, 0x05}, uint32(distance-length)), 0xc3)
}

func instructions(values ...uint32) []byte {
	var out []byte
	for _, v := range values {
		out = binary.LittleEndian.AppendUint32(out, v)
	}
	return out
}

func symbolTable(names []uint32, at []uint64, text uint64) []byte {
	var out bytes.Buffer
	write(&out, elf.Sym64{})
	for i, name := range names {
		// Section 4 of the table below; any but zero says that the symbol is defined here.
		write(&out, elf.Sym64{Name: name, Info: elf.ST_INFO(elf.STB_GLOBAL, elf.STT_FUNC), Shndx: 4, Value: text + at[i], Size: 16})
	}
	return out.Bytes()
}

// write cannot fail: the values are of fixed size and the buffer grows.
func write(out *bytes.Buffer, value any) {
	_ = binary.Write(out, binary.LittleEndian, value) //nolint:errcheck // as said
}

// sections writes the section table, which loaders do not need but debug/elf, and so nvcdi, does.
func (o *object) sections(dynamic, dynamicSize, strings, symbols, symbolsSize uint64) uint64 {
	const names = "\x00.dynstr\x00.dynamic\x00.shstrtab\x00.dynsym\x00"
	namesAt := o.put([]byte(names))
	o.align()
	at := uint64(o.out.Len())
	for _, s := range []elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_STRTAB), Flags: uint64(elf.SHF_ALLOC), Addr: strings, Off: strings, Size: uint64(len(o.strings)), Addralign: 1},
		{Name: 9, Type: uint32(elf.SHT_DYNAMIC), Flags: uint64(elf.SHF_ALLOC | elf.SHF_WRITE), Addr: dynamic + dataOffset, Off: dynamic,
			Size: dynamicSize, Link: 1, Addralign: 8, Entsize: 16},
		{Name: 18, Type: uint32(elf.SHT_STRTAB), Off: namesAt, Size: uint64(len(names)), Addralign: 1},
		{Name: 28, Type: uint32(elf.SHT_DYNSYM), Flags: uint64(elf.SHF_ALLOC), Addr: symbols, Off: symbols, Size: symbolsSize,
			Link: 1, Info: 1, Addralign: 8, Entsize: 24},
	} {
		write(&o.out, s)
	}
	return at
}

// header fills in the file header and the program headers in the space that was reserved for them.
func (o *object) header(readable, dynamic, dynamicSize, sections uint64) {
	var head bytes.Buffer
	write(&head, elf.Header64{
		Ident:   [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:    uint16(elf.ET_DYN),
		Machine: uint16(o.machine),
		Version: uint32(elf.EV_CURRENT),
		Phoff:   64, Shoff: sections,
		Ehsize: 64, Phentsize: 56, Phnum: 4, Shentsize: 64, Shnum: 5, Shstrndx: 3,
	})
	for _, p := range []elf.Prog64{
		{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Filesz: readable, Memsz: readable, Align: dataOffset},
		{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_W), Off: dynamic, Vaddr: dynamic + dataOffset, Paddr: dynamic + dataOffset,
			Filesz: dynamicSize, Memsz: dynamicSize, Align: dataOffset},
		{Type: uint32(elf.PT_DYNAMIC), Flags: uint32(elf.PF_R | elf.PF_W), Off: dynamic, Vaddr: dynamic + dataOffset, Paddr: dynamic + dataOffset,
			Filesz: dynamicSize, Memsz: dynamicSize, Align: 8},
		{Type: uint32(elf.PT_GNU_STACK), Flags: uint32(elf.PF_R | elf.PF_W), Align: 16},
	} {
		write(&head, p)
	}
	copy(o.out.Bytes(), head.Bytes())
}
