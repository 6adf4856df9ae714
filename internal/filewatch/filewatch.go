// SPDX-License-Identifier: Apache-2.0

// Package filewatch reports that something changed in a few directories. It uses inotify. Where inotify fails, because all processes
// of a user share a few hundred instances, it reports a possible change at intervals.
package filewatch

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

// NewWatcher creates an inotify instance. Only tests replace it, to exhaust inotify.
var NewWatcher = fsnotify.NewWatcher

// Options say what to watch.
type Options struct {
	// Dirs are watched without their subdirectories. They may be missing and may be replaced. A missing directory is looked for at each
	// Interval, and at once when its parent is among Dirs.
	Dirs []string
	// Interval is how often C reports a possible change while an existing directory cannot be watched. Required.
	Interval time.Duration
	// Settle delays a report after the first change, so that it covers the changes that follow. Zero delays nothing.
	Settle time.Duration
	// Relevant filters changes; nil accepts all. It is called from the watcher's goroutine, and not for changes that inotify lost.
	Relevant func(fsnotify.Event) bool
}

// Watcher reports changes. Events can be lost or merged: after each report the receiver reads the files.
type Watcher struct {
	// C receives a value after changes; changes until the value is read are merged into it.
	C <-chan struct{}

	changed chan struct{}
	options Options
	inotify *fsnotify.Watcher
	watched map[string]bool
	// logged is the last failure that was logged, so that each is logged once.
	logged string

	stop    context.CancelFunc
	running sync.WaitGroup
}

// New watches from before its return until Close or until ctx is done. It does not fail: see Options.Interval.
func New(ctx context.Context, options Options) *Watcher {
	options.Dirs = slices.Clone(options.Dirs)
	for i, dir := range options.Dirs {
		options.Dirs[i] = filepath.Clean(dir)
	}
	changed := make(chan struct{}, 1)
	w := &Watcher{C: changed, changed: changed, options: options, watched: map[string]bool{}}
	ctx, w.stop = context.WithCancel(ctx)
	w.add(ctx)
	w.running.Go(func() { w.run(ctx) })
	return w
}

// Close ends the watch and waits until it has ended. Idempotent.
func (w *Watcher) Close() {
	w.stop()
	w.running.Wait()
}

// add watches all directories that can be watched. It reports whether changes may have been missed in one of them: it was not watched
// before the call, or it cannot be watched.
func (w *Watcher) add(ctx context.Context) (missed bool) {
	var failure error
	if w.inotify == nil {
		if w.inotify, failure = NewWatcher(); failure != nil {
			w.inotify = nil
			w.log(ctx, failure)
			return true
		}
	}
	for _, dir := range w.options.Dirs {
		err := w.inotify.Add(dir)
		if err == nil && !w.watched[dir] {
			missed = true
		}
		w.watched[dir] = err == nil
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			missed, failure = true, err
		}
	}
	w.log(ctx, failure)
	return missed
}

func (w *Watcher) log(ctx context.Context, failure error) {
	if failure == nil {
		w.logged = ""
	} else if text := failure.Error(); text != w.logged {
		w.logged = text
		klog.FromContext(ctx).Info("Cannot watch directories, checking them at intervals",
			"directories", w.options.Dirs, "interval", w.options.Interval, "err", failure)
	}
}

func (w *Watcher) complete() bool {
	return !slices.ContainsFunc(w.options.Dirs, func(dir string) bool { return !w.watched[dir] })
}

func (w *Watcher) run(ctx context.Context) {
	defer func() {
		if w.inotify != nil {
			_ = w.inotify.Close() // releases memory and descriptors only
		}
	}()
	retry := time.NewTicker(w.options.Interval)
	defer retry.Stop()
	var settled <-chan time.Time
	for {
		var events <-chan fsnotify.Event
		var failures <-chan error
		if w.inotify != nil {
			events, failures = w.inotify.Events, w.inotify.Errors
		}
		var tick <-chan time.Time
		if !w.complete() {
			tick = retry.C
		}
		var changed bool
		select {
		case <-ctx.Done():
			return
		case <-settled:
			settled = nil
			w.report()
			continue
		case event, open := <-events:
			if !open {
				w.inotify = nil
				clear(w.watched)
				continue
			}
			changed = w.options.Relevant == nil || w.options.Relevant(event)
			moved := event.Has(fsnotify.Create) || event.Has(fsnotify.Remove) || event.Has(fsnotify.Rename)
			if moved && slices.Contains(w.options.Dirs, filepath.Clean(event.Name)) {
				w.watched[filepath.Clean(event.Name)] = false
				changed = w.add(ctx) || changed
			}
		case _, open := <-failures:
			// The queue overflowed: events were lost.
			changed = open
		case <-tick:
			changed = w.add(ctx)
		}
		switch {
		case changed && w.options.Settle > 0:
			if settled == nil {
				settled = time.After(w.options.Settle)
			}
		case changed:
			w.report()
		}
	}
}

func (w *Watcher) report() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}
