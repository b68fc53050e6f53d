package main

import (
	"context"
	"debug/buildinfo"
	"fmt"
	"io"
	"runtime/debug"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// sbom writes the bill of materials: each Go module that the build information of the binary
// names, in the JSON of CycloneDX. The modules of both architectures are the same.
func (r *release) sbom(context.Context, string) error {
	info, err := buildinfo.ReadFile(r.path(r.arches[0], "tandem"))
	if err != nil {
		return err
	}
	program := cdx.Component{
		BOMRef: "tandem", Type: cdx.ComponentTypeApplication, Name: "tandem", Version: r.version,
		PackageURL: "pkg:golang/" + info.Main.Path + "@v" + r.version,
		Licenses:   &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
	}
	components := []cdx.Component{goModule(&debug.Module{Path: "stdlib", Version: info.GoVersion})}
	refs := []string{components[0].BOMRef}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		c := goModule(m)
		components, refs = append(components, c), append(refs, c.BOMRef)
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Timestamp: r.epoch.Format("2006-01-02T15:04:05Z"), Component: &program}
	bom.Components = &components
	bom.Dependencies = &[]cdx.Dependency{{Ref: program.BOMRef, Dependencies: &refs}}
	return r.create(fmt.Sprintf("tandem-%s.cdx.json", r.version), func(w io.Writer) error {
		return cdx.NewBOMEncoder(w, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
	})
}

func goModule(m *debug.Module) cdx.Component {
	url := fmt.Sprintf("pkg:golang/%s@%s", m.Path, m.Version)
	return cdx.Component{BOMRef: url, Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version, PackageURL: url}
}
