// SPDX-License-Identifier: Apache-2.0

package models

// table describes what a model offers, as nvidia-smi prints it: `nvidia-smi mig -lgip` prints name, profile ID, instances,
// memory, multiprocessors and engines; GiB have two digits, and the driver's figures are multiples of 64 MiB, so "19.62" is 20096
// MiB. `nvidia-smi mig -lgipp` prints placements in memory slices. Sources: published output of these commands; otherwise the
// tables of NVIDIA's MIG User Guide ("Supported MIG Profiles"), which lack IDs and placements; otherwise inference. Each table
// names its source. Memory differs slightly between driver versions and boards (1g.10gb of A100-80GB was 9.75 GiB and is 9.50),
// so no code may depend on the last digit. The mock tables of go-nvml (pkg/nvml/mock/gpus) have other figures for Hopper and
// Blackwell, which published output contradicts: IDs equal to the enum, a 3g of three slices, a 7g of seven, 16 multiprocessors
// for 1g.20gb. Placements are in memory slices, so a 3g takes four of eight.
type table struct {
	name, product string
	// mib is the whole GPU's memory in MiB, as nvidia-smi prints it: what NVML answers, rounded.
	mib  uint64
	rows []row
}

type row struct {
	name            string
	id              int
	enum            int
	instances       int
	mib             uint64
	multiprocessors int
	copies          int
	decoders        int
	encoders        int
	jpegs           int
	ofas            int
	size            int
	starts          []int
}

// NVML_GPU_INSTANCE_PROFILE_* (nvml.h).
const (
	slice1       = 0x00
	slice2       = 0x01
	slice3       = 0x02
	slice4       = 0x03
	slice7       = 0x04
	slice1Me     = 0x07 // 1_SLICE_REV1: "+me"
	slice2Me     = 0x08 // 2_SLICE_REV1: "+me"
	slice1Double = 0x09 // 1_SLICE_REV2: twice the memory
	slice1Gfx    = 0x0a
	slice2Gfx    = 0x0b
	slice4Gfx    = 0x0c
	slice1NoMe   = 0x0d
	slice2NoMe   = 0x0e
	slice1AllMe  = 0x0f
	slice2AllMe  = 0x10
)

// widths are the compute slices of each enum.
var widths = map[int]int{
	slice1: 1, slice1Me: 1, slice1Double: 1, slice1Gfx: 1, slice1NoMe: 1, slice1AllMe: 1,
	slice2: 2, slice2Me: 2, slice2Gfx: 2, slice2NoMe: 2, slice2AllMe: 2,
	slice3: 3, slice4: 4, slice4Gfx: 4, slice7: 7,
}

// Where profiles start: on a GPU with eight memory slices, and on one with four. The eighth slice has no compute slice of its
// own, so a 1g never starts there. Eight: nvidia-smi mig -lgipp of A100-40GB (MIG User Guide), H100-80GB and H100-94GB. Four:
// of A30.
var (
	ones    = []int{0, 1, 2, 3, 4, 5, 6}
	twos    = []int{0, 2, 4}
	doubles = []int{0, 2, 4, 6}
	halves  = []int{0, 4}
	first   = []int{0}

	quarters4 = []int{0, 1, 2, 3}
	halves4   = []int{0, 2}
)

// The columns are those of row: name, ID, enum, instances, MiB, SM, CE, DEC, ENC, JPEG, OFA, slices, starts.
var tables = []table{
	// nvidia-smi mig -lgip and -lgipp of an A30, with the 2g.12gb+me that came with R525. The MIG User Guide says that a 1g.6gb
	// has no decoder; nvidia-smi prints one.
	{"A30-24GB", "NVIDIA A30", 24576, []row{
		{"1g.6gb", 14, slice1, 4, 5952, 14, 1, 1, 0, 0, 0, 1, quarters4},
		{"1g.6gb+me", 21, slice1Me, 1, 5952, 14, 1, 1, 0, 1, 1, 1, quarters4},
		{"2g.12gb", 5, slice2, 2, 11968, 28, 2, 2, 0, 0, 0, 2, halves4},
		{"2g.12gb+me", 6, slice2Me, 1, 11968, 28, 2, 2, 0, 1, 1, 2, halves4},
		{"4g.24gb", 0, slice4, 1, 24000, 56, 4, 4, 0, 1, 1, 4, first},
	}},
	// nvidia-smi mig -lgip and -lgipp in the MIG User Guide ("Getting Started"). Older drivers have no 1g.10gb.
	{"A100-40GB", "NVIDIA A100-SXM4-40GB", 40960, []row{
		{"1g.5gb", 19, slice1, 7, 4864, 14, 1, 0, 0, 0, 0, 1, ones},
		{"1g.5gb+me", 20, slice1Me, 1, 4864, 14, 1, 1, 0, 1, 1, 1, ones},
		{"1g.10gb", 15, slice1Double, 4, 9856, 14, 1, 1, 0, 0, 0, 2, doubles},
		{"2g.10gb", 14, slice2, 3, 9856, 28, 2, 1, 0, 0, 0, 2, twos},
		{"3g.20gb", 9, slice3, 2, 19968, 42, 3, 2, 0, 0, 0, 4, halves},
		{"4g.20gb", 5, slice4, 1, 19968, 56, 4, 2, 0, 0, 0, 4, first},
		{"7g.40gb", 0, slice7, 1, 40192, 98, 7, 5, 0, 1, 1, 8, first},
	}},
	// nvidia-smi mig -lgip of an A100-SXM4-80GB; placements as those of the A100-40GB, which -lgipp of one confirms.
	{"A100-80GB", "NVIDIA A100-SXM4-80GB", 81920, []row{
		{"1g.10gb", 19, slice1, 7, 9728, 14, 1, 0, 0, 0, 0, 1, ones},
		{"1g.10gb+me", 20, slice1Me, 1, 9728, 14, 1, 1, 0, 1, 1, 1, ones},
		{"1g.20gb", 15, slice1Double, 4, 19968, 14, 1, 1, 0, 0, 0, 2, doubles},
		{"2g.20gb", 14, slice2, 3, 19968, 28, 2, 1, 0, 0, 0, 2, twos},
		{"3g.40gb", 9, slice3, 2, 40192, 42, 3, 2, 0, 0, 0, 4, halves},
		{"4g.40gb", 5, slice4, 1, 40192, 56, 4, 2, 0, 0, 0, 4, first},
		{"7g.80gb", 0, slice7, 1, 80896, 98, 7, 5, 0, 1, 1, 8, first},
	}},
	// nvidia-smi mig -lgip and -lgipp of an H100 80GB HBM3 (SXM5). The PCIe board has 114 multiprocessors: 14 for a 1g and a
	// 1g.20gb, 30, 46, 62.
	{"H100-80GB", "NVIDIA H100 80GB HBM3", 81559, []row{
		{"1g.10gb", 19, slice1, 7, 9984, 16, 1, 1, 0, 1, 0, 1, ones},
		{"1g.10gb+me", 20, slice1Me, 1, 9984, 16, 1, 1, 0, 1, 1, 1, ones},
		{"1g.20gb", 15, slice1Double, 4, 20096, 26, 1, 1, 0, 1, 0, 2, doubles},
		{"2g.20gb", 14, slice2, 3, 20096, 32, 2, 2, 0, 2, 0, 2, twos},
		{"3g.40gb", 9, slice3, 2, 40448, 60, 3, 3, 0, 3, 0, 4, halves},
		{"4g.40gb", 5, slice4, 1, 40448, 64, 4, 4, 0, 4, 0, 4, first},
		{"7g.80gb", 0, slice7, 1, 81152, 132, 8, 7, 0, 7, 1, 8, first},
	}},
	// nvidia-smi mig -lgip and -lgipp of an H100 NVL. Other drivers print 21.62, 46.38 and 93.12 GiB.
	{"H100-94GB", "NVIDIA H100 NVL", 95830, []row{
		{"1g.12gb", 19, slice1, 7, 10880, 16, 1, 1, 0, 1, 0, 1, ones},
		{"1g.12gb+me", 20, slice1Me, 1, 10880, 16, 1, 1, 0, 1, 1, 1, ones},
		{"1g.24gb", 15, slice1Double, 4, 22016, 26, 1, 1, 0, 1, 0, 2, doubles},
		{"2g.24gb", 14, slice2, 3, 22016, 32, 2, 2, 0, 2, 0, 2, twos},
		{"3g.47gb", 9, slice3, 2, 47232, 60, 3, 3, 0, 3, 0, 4, halves},
		{"4g.47gb", 5, slice4, 1, 47232, 64, 4, 4, 0, 4, 0, 4, first},
		{"7g.94gb", 0, slice7, 1, 94848, 132, 8, 7, 0, 7, 1, 8, first},
	}},
	// nvidia-smi mig -lgip of a GH200 480GB. No -lgipp was found: the starts are those of the H100.
	{"GH200-96GB", "NVIDIA GH200 480GB", 97871, []row{
		{"1g.12gb", 19, slice1, 7, 11264, 16, 1, 1, 0, 1, 0, 1, ones},
		{"1g.12gb+me", 20, slice1Me, 1, 11264, 16, 1, 1, 0, 1, 1, 1, ones},
		{"1g.24gb", 15, slice1Double, 4, 23552, 26, 1, 1, 0, 1, 0, 2, doubles},
		{"2g.24gb", 14, slice2, 3, 23552, 32, 2, 2, 0, 2, 0, 2, twos},
		{"3g.48gb", 9, slice3, 2, 47616, 60, 3, 3, 0, 3, 0, 4, halves},
		{"4g.48gb", 5, slice4, 1, 47616, 64, 4, 4, 0, 4, 0, 4, first},
		{"7g.96gb", 0, slice7, 1, 95232, 132, 8, 7, 0, 7, 1, 8, first},
	}},
	// nvidia-smi mig -lgip of an H200 (NVIDIA/mig-parted#120). No -lgipp was found: the starts are those of the H100.
	{"H200-141GB", "NVIDIA H200", 143771, []row{
		{"1g.18gb", 19, slice1, 7, 16384, 16, 1, 1, 0, 1, 0, 1, ones},
		{"1g.18gb+me", 20, slice1Me, 1, 16384, 16, 1, 1, 0, 1, 1, 1, ones},
		{"1g.35gb", 15, slice1Double, 4, 33024, 26, 1, 1, 0, 1, 0, 2, doubles},
		{"2g.35gb", 14, slice2, 3, 33024, 32, 2, 2, 0, 2, 0, 2, twos},
		{"3g.71gb", 9, slice3, 2, 71168, 60, 3, 3, 0, 3, 0, 4, halves},
		{"4g.71gb", 5, slice4, 1, 71168, 64, 4, 4, 0, 4, 0, 4, first},
		{"7g.141gb", 0, slice7, 1, 143104, 132, 8, 7, 0, 7, 1, 8, first},
	}},
	// nvidia-smi mig -lgip of a B200 (NVIDIA/mig-parted#187, with 1g.23gb at 20.50 GiB as production boards have it; earlier
	// output says 22.00). From the 3g up, IDs, engines and starts were not found in output: IDs and starts are those of the H100,
	// copy engines are the MIG User Guide's, decoders and JPEG engines go on as 1g and 2g begin (the guide says one for every
	// profile, where nvidia-smi prints two for a 2g; and three copy engines for a 2g, where nvidia-smi prints four).
	{"B200-180GB", "NVIDIA B200", 183359, []row{
		{"1g.23gb", 19, slice1, 7, 20992, 18, 2, 1, 0, 1, 0, 1, ones},
		{"1g.23gb+me", 20, slice1Me, 1, 20992, 18, 2, 1, 0, 1, 1, 1, ones},
		{"1g.45gb", 15, slice1Double, 4, 45312, 30, 2, 1, 0, 1, 0, 2, doubles},
		{"2g.45gb", 14, slice2, 3, 45312, 36, 4, 2, 0, 2, 0, 2, twos},
		{"3g.90gb", 9, slice3, 2, 91136, 70, 6, 3, 0, 3, 0, 4, halves},
		{"4g.90gb", 5, slice4, 1, 91136, 72, 8, 4, 0, 4, 0, 4, first},
		{"7g.180gb", 0, slice7, 1, 182784, 148, 16, 7, 0, 7, 1, 8, first},
	}},
	// nvidia-smi mig -lgip of a GB200 up to the 2g (NVIDIA/mig-parted#227); names of the others from the same place. Their memory
	// and multiprocessors are not published: worked out as those of the B200 follow from its 2g, and from 152 multiprocessors.
	// Boards before production had 1g.24gb, 3g.95gb and 7g.189gb.
	{"GB200-186GB", "NVIDIA GB200", 189471, []row{
		{"1g.23gb", 19, slice1, 7, 22528, 18, 2, 1, 0, 1, 0, 1, ones},
		{"1g.23gb+me", 20, slice1Me, 1, 22528, 18, 2, 1, 0, 1, 1, 1, ones},
		{"1g.47gb", 15, slice1Double, 4, 46592, 32, 2, 1, 0, 1, 0, 2, doubles},
		{"2g.47gb", 14, slice2, 3, 46592, 38, 4, 2, 0, 2, 0, 2, twos},
		{"3g.93gb", 9, slice3, 2, 93696, 74, 6, 3, 0, 3, 0, 4, halves},
		{"4g.93gb", 5, slice4, 1, 93696, 76, 8, 4, 0, 4, 0, 4, first},
		{"7g.186gb", 0, slice7, 1, 187904, 152, 16, 7, 0, 7, 1, 8, first},
	}},
	// nvidia-smi mig -lgip of an RTX PRO 6000 Blackwell Server Edition: the model here that has graphics in partitions ("+gfx"),
	// all media engines in one ("+me.all") and none ("-me"). No -lgipp was found: the starts are those of the A30, which has
	// four slices too.
	{"RTX-PRO-6000-96GB", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, []row{
		{"1g.24gb", 14, slice1, 4, 24192, 46, 1, 1, 1, 1, 0, 1, quarters4},
		{"1g.24gb+me", 21, slice1Me, 1, 24192, 46, 1, 1, 1, 1, 1, 1, quarters4},
		{"1g.24gb+gfx", 47, slice1Gfx, 4, 24192, 46, 1, 1, 1, 1, 0, 1, quarters4},
		{"1g.24gb+me.all", 65, slice1AllMe, 1, 24192, 46, 1, 4, 4, 4, 1, 1, quarters4},
		{"1g.24gb-me", 67, slice1NoMe, 4, 24192, 46, 1, 0, 0, 0, 0, 1, quarters4},
		{"2g.48gb", 5, slice2, 2, 48512, 94, 2, 2, 2, 2, 0, 2, halves4},
		{"2g.48gb+gfx", 35, slice2Gfx, 2, 48512, 94, 2, 2, 2, 2, 0, 2, halves4},
		{"2g.48gb+me.all", 64, slice2AllMe, 1, 48512, 94, 2, 4, 4, 4, 1, 2, halves4},
		{"2g.48gb-me", 66, slice2NoMe, 2, 48512, 94, 2, 0, 0, 0, 0, 2, halves4},
		{"4g.96gb", 0, slice4, 1, 97280, 188, 4, 4, 4, 4, 1, 4, first},
		{"4g.96gb+gfx", 32, slice4Gfx, 1, 97280, 188, 4, 4, 4, 4, 1, 4, first},
	}},
}
