// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// logLevel is the value of --log-level, and the level that counts now; zero is info.
type logLevel struct {
	level slog.Level
	now   slog.LevelVar
}

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
	l.now.Set(level)
	return nil
}

// String implements pflag.Value.
func (l *logLevel) String() string { return nameOf(l.level) }

func nameOf(l slog.Level) string {
	for name, level := range logLevels() {
		if level == l {
			return name
		}
	}
	return ""
}

// Type implements pflag.Value.
func (*logLevel) Type() string { return "string" }

// Level implements slog.Leveler.
func (l *logLevel) Level() slog.Level { return l.now.Level() }

// follow changes the level when a signal asks for it: SIGUSR1 logs everything
// that helps to find a fault, SIGUSR2 what --log-level says. It does so until
// the returned function is called.
func (l *logLevel) follow(log *slog.Logger) (end func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGUSR2)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for s := range signals {
			level := l.level
			if s == syscall.SIGUSR1 {
				level = min(level, slog.LevelDebug)
			}
			l.now.Set(level)
			log.Warn("log level changed", "level", nameOf(level))
		}
	}()
	return func() {
		signal.Stop(signals)
		close(signals)
		<-done
	}
}

// newLogger logs JSON, one object a line, with the existing Kilo's keys ts,
// caller, level and msg.
func newLogger(w io.Writer, level slog.Leveler) *slog.Logger {
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{
		AddSource: true,
		Level:     level,
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
