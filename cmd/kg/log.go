// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"log/slog"
	"math"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// logLevel is the value of --log-level; zero is info.
type logLevel struct{ level slog.Level }

// logLevels by name. Nothing is logged at a level as high as that of none.
func logLevels() map[string]slog.Level {
	return map[string]slog.Level{
		"all": math.MinInt, "debug": slog.LevelDebug, "info": slog.LevelInfo,
		"warn": slog.LevelWarn, "error": slog.LevelError, "none": math.MaxInt,
	}
}

// Set implements pflag.Value.
func (l *logLevel) Set(s string) error {
	level, ok := logLevels()[s]
	if !ok {
		return fmt.Errorf("log level %q: want one of all, debug, info, warn, error, none", s)
	}
	l.level = level
	return nil
}

// String implements pflag.Value.
func (l *logLevel) String() string {
	for name, level := range logLevels() {
		if level == l.level {
			return name
		}
	}
	return ""
}

// Type implements pflag.Value.
func (*logLevel) Type() string { return "string" }

// newLogger logs JSON, one object a line, with the existing Kilo's keys ts,
// caller, level and msg.
func newLogger(w io.Writer, level logLevel) *slog.Logger {
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{
		AddSource: true,
		Level:     level.level,
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) > 0 {
				return a
			}
			switch v := a.Value.Any().(type) {
			case time.Time:
				if a.Key == slog.TimeKey {
					return slog.String("ts", v.UTC().Format(time.RFC3339Nano))
				}
			case slog.Level:
				if a.Key == slog.LevelKey {
					return slog.String(a.Key, strings.ToLower(v.String()))
				}
			case *slog.Source:
				return slog.String("caller", filepath.Base(v.File)+":"+strconv.Itoa(v.Line))
			}
			return a
		},
	}))
}
