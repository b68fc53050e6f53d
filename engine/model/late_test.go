package model

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/tandem-serving/tandem/engine/backend"
	"github.com/tandem-serving/tandem/engine/backend/cpu"
	"github.com/tandem-serving/tandem/engine/safetensors"
)

// Matrices whose numbers come after Load give the logits of those that are loaded: of all tensors'
// forms, in float16 too. Some rows of a matrix of the vocabulary are those of the whole one.
func TestLate(t *testing.T) {
	for _, name := range []string{"mha", "phi3", "glm4", "gemma4-moe", "gemma4-ple", "granitemoe", "deepseek-v2-lite", "qwen3-next"} {
		for _, half := range []bool{false, true} {
			files := memoryCopy(t, name, nil, func(all map[string]safetensors.Tensor) {
				for name, x := range all {
					if !half || widths[x.DType] < 2 {
						continue
					}
					var data []byte
					for k := range len(x.Data) / widths[x.DType] {
						v := number(x.Data, k, x.DType)
						h := uint16(math.Float32bits(v)>>31<<15) | 0x2800 | uint16(k*37%900) // about 0.04
						data = binary.LittleEndian.AppendUint16(data, h)
					}
					x.DType, x.Data = "F16", data
					all[name] = x
				}
			})
			var want []float32
			for _, late := range []bool{false, true} {
				src, err := OpenFS(files, name)
				if err != nil {
					t.Fatal(err)
				}
				dev, err := cpu.New(cpu.Options{Threads: 1, Limits: testLimits})
				if err != nil {
					t.Fatal(err)
				}
				var o Options
				count := 0
				if late {
					o.Late = func(tn backend.Tensor, read func(rows []int) backend.Tensor) (backend.Weight, error) {
						count++
						whole := read(nil)
						if whole.DType != tn.DType || !slices.Equal(whole.Shape, tn.Shape) || whole.Name != tn.Name || whole.Of != tn.Of || tn.Data != nil {
							return 0, fmt.Errorf("%+v, and later %s %v %v of %d", tn, whole.Name, whole.DType, whole.Shape, whole.Of)
						}
						if tn.Of == 0 {
							w, err := dev.Reserve(tn)
							if err == nil {
								err = dev.Reload(w, whole.Data)
							}
							return w, err
						}
						row := tn.Shape[1] * tn.DType.Size()
						if some := read([]int{3, 1, 3}).Data; !bytes.Equal(some, slices.Concat(whole.Data[3*row:4*row], whole.Data[row:2*row], whole.Data[3*row:4*row])) {
							return 0, fmt.Errorf("rows of %s differ", tn.Name)
						}
						return dev.Load(whole)
					}
				}
				m, err := Load(src, dev, testLimits, o)
				if err == nil {
					err = dev.AllocKV(testKV(&m.config))
				}
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				rows, _ := newSequence(m, []int32{5, 9, 2, 40, 7}, 1).step(t, 5, []int{1, 4})
				got := slices.Concat(rows...)
				if want == nil {
					want = got
				}
				if late && count == 0 || !slices.Equal(got, want) {
					t.Errorf("%s, half %v: the logits differ, of %d late matrices", name, half, count)
				}
				if err := dev.Close(); err != nil {
					t.Error(err)
				}
				if err := src.Close(); err != nil {
					t.Error(err)
				}
			}
		}
	}
}
