//! Reconciliation of the gateway with its files, at the start and after every change.
//!
//! Each source has its last usable content ([`Files`]) and its last error ([`Outcome`]). A pass
//! reads the sources that are due, joins the contents, and applies what differs from the state in
//! force. Invalid content is logged and counted, and the previous content stays in use.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io::Read;
use std::mem;
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tracing::{error, info, warn};

use crate::config::{Config, Discovery, Examined, Identity, MeshFile, Source};
use crate::snapshot::builder::Change;
use crate::status::ReloadSource;
use crate::telemetry::LogHandle;
use crate::tls::{IdentityMaterial, PeerTrust, TlsError};
use crate::watch::FileWatcher;
use crate::xds;
use crate::xds::live::LiveSource;
use crate::xds::objects;
use crate::yaml::{FILE_BYTES_MAX, Finding, Findings, Severity, yaml_files};

use super::certificates::SharedCertificates;
use super::inputs::{Files, Inputs};
use super::signals::ReloadSignal;
use super::state::{App, DISCOVERY, OBJECTS};
use super::{traffic, trust};

/// Minimum interval between two applications of changes of an API server. Each reads the changed
/// objects alone, and joins all.
const LIVE_INTERVAL: Duration = Duration::from_millis(100);

/// Limit of the findings in one line of the log. `strait status` has all.
const LINES_MAX: usize = 50;

/// Interval at which rejected certificates and listeners that are not open are tried again.
const RETRY: Duration = Duration::from_secs(10);

/// Fingerprints of the files when they were last read. They are taken before the reading, so that
/// a concurrent change is found afterwards.
pub(super) type Fingerprints = BTreeMap<PathBuf, u64>;

/// Causes of reloads: files whose fingerprints differ from those at the start, and a signal.
pub(super) struct Triggers {
    pub(super) seen: Fingerprints,
    pub(super) signal: ReloadSignal,
}

/// Part of a source that is not in force.
#[derive(Clone, Debug, Default, PartialEq)]
struct Outcome {
    /// Mistakes in the newest content; empty if that is in use.
    errors: Vec<String>,
    /// Parts of the content in use that are not in force, one line each.
    left: Vec<String>,
}

/// Watches the four kinds of files and applies their changes, one at a time. It has a dedicated
/// thread, because a mount that hangs blocks it.
pub(super) struct Reloader {
    source: Source,
    app: App,
    log: LogHandle,
    certificates: SharedCertificates,
    triggers: Triggers,
    files: Files,
    /// Objects of an API server, if one is watched.
    live: Option<Arc<LiveSource>>,
    /// Number of their contents in force, and the time at which these were read.
    live_read: (u64, Instant),
    /// Findings about live objects by which they were judged: those of the join, and those about
    /// their listeners.
    judged: [Vec<Finding>; 2],
    /// Time that the last reconciliation took.
    took: Duration,
    /// Time of the next [`RETRY`].
    retry_at: Instant,
    /// Outcome of the last reload of each kind.
    outcomes: BTreeMap<ReloadSource, Outcome>,
    /// Files that a rejected configuration names: the configuration may become valid with one of
    /// them.
    files_of_rejected: Vec<PathBuf>,
    /// Findings about the contents in use.
    findings: Findings,
}

impl Reloader {
    /// Applies the files of the start.
    ///
    /// # Errors
    /// The own certificate is unusable, or an address of the configuration cannot be bound.
    pub(super) fn start(
        source: Source,
        app: &App,
        mut inputs: Inputs,
        triggers: Triggers,
        certificates: SharedCertificates,
        log: LogHandle,
    ) -> anyhow::Result<Self> {
        let mut reloader = Self {
            source,
            app: app.clone(),
            log,
            certificates,
            triggers,
            files: inputs.files.clone(),
            live: app.live.clone(),
            live_read: (0, Instant::now()),
            judged: [Vec::new(), Vec::new()],
            took: Duration::ZERO,
            retry_at: Instant::now() + RETRY,
            outcomes: BTreeMap::new(),
            files_of_rejected: Vec::new(),
            findings: Findings::default(),
        };
        for what in ReloadSource::ALL {
            if !files(&inputs.config, what).is_empty() {
                app.status.set_reload(what, Ok(None));
            }
        }
        let own = inputs.own.take().map(Ok);
        reloader.apply(None, Some(inputs), own).map_err(anyhow::Error::msg)?;
        let mut rows = app.listeners.rows().into_iter();
        if let Some(closed) = rows.find(|row| row.error.is_some() && !row.listener.is_of_object()) {
            return Err(anyhow::Error::msg(closed.error.unwrap_or_default()));
        }
        reloader.record(&BTreeMap::new(), &BTreeSet::new());
        Ok(reloader)
    }

    pub(super) async fn run(mut self) {
        let mut files = self.files();
        let mut watcher = FileWatcher::new(&files)
            .inspect_err(|error| error!(%error, "cannot watch files; changes need SIGHUP"))
            .ok();
        loop {
            // Also before the first event: a file may have changed before it was watched.
            if self.apply_changes() {
                // A file that changed between its fingerprint and its reading has an outdated
                // fingerprint. A change back to the old content would then be missed.
                self.apply_changes();
            }
            let now = self.files();
            if now == files {
                self.next_change(watcher.as_mut()).await;
                continue;
            }
            if let Some(Err(error)) = watcher.as_mut().map(|watcher| watcher.replace(&now)) {
                warn!(%error, "cannot watch files; their changes are not detected");
            }
            files = now;
        }
    }

    /// Waits for an event of the watcher, or for SIGHUP. Rejected certificates are tried again
    /// meanwhile: they become usable without a change if they were not valid yet. So are listeners,
    /// whose addresses others may release.
    async fn next_change(&mut self, watcher: Option<&mut FileWatcher>) {
        let changed = async {
            match watcher {
                Some(watcher) => watcher.changed().await,
                None => std::future::pending().await,
            }
        };
        let (live, (version, at)) = (self.live.clone(), self.live_read);
        // Changes of objects take at most a quarter of the thread.
        let rest = LIVE_INTERVAL.max(4 * self.took);
        let live_changed = async {
            match &live {
                Some(live) => live.changed(version).await,
                None => std::future::pending().await,
            }
            sleep_until(at + rest).await;
        };
        tokio::select! {
            () = changed => {}
            () = live_changed => self.reconcile(&BTreeSet::new(), &BTreeSet::new()),
            () = sleep_until(self.retry_at) => {
                self.retry_at = Instant::now() + RETRY;
                let has_failed = self.has_failed(ReloadSource::Certificates);
                if has_failed || self.app.listeners.has_closed() {
                    let due = has_failed.then_some(ReloadSource::Certificates);
                    self.reconcile(&due.into_iter().collect(), &BTreeSet::new());
                }
            }
            () = self.app.status.release_objects.notified() => {
                live.iter().for_each(|live| live.release("requested by `strait release`"));
            }
            () = self.triggers.signal.received() => {
                info!(signal = "SIGHUP", "reading all files again");
                // All files count as changed.
                self.triggers.seen.clear();
            }
        }
    }

    /// Returns all files whose changes matter.
    fn files(&self) -> Vec<PathBuf> {
        let config = self.files.config();
        let in_force = ReloadSource::ALL.iter().flat_map(|&what| files(config, what));
        let all: BTreeSet<_> = in_force.chain(self.files_of_rejected.iter().cloned()).collect();
        all.into_iter().collect()
    }

    fn has_failed(&self, what: ReloadSource) -> bool {
        self.outcomes.get(&what).is_some_and(|outcome| !outcome.errors.is_empty())
    }

    /// Reloads the changed sources, and returns true if a file has changed. Sources that failed
    /// before are tried again after every change, because they may depend on it: a root on its
    /// file, a configuration on a file that it names.
    fn apply_changes(&mut self) -> bool {
        let now = fingerprints(&self.files());
        let seen = mem::replace(&mut self.triggers.seen, now.clone());
        let is_new = |file: &PathBuf| seen.get(file) != now.get(file);
        if !now.keys().any(is_new) {
            return false;
        }
        let config = self.files.config();
        let has_changed = |what: &ReloadSource| files(config, *what).iter().any(is_new);
        let changed: BTreeSet<_> = ReloadSource::ALL.into_iter().filter(has_changed).collect();
        let is_due = |what: &ReloadSource| changed.contains(what) || self.has_failed(*what);
        let due = ReloadSource::ALL.into_iter().filter(is_due).collect();
        self.reconcile(&due, &changed);
        true
    }

    /// Reads the sources that are due, and applies what they change. Listeners that are closed are
    /// tried again.
    fn reconcile(&mut self, due: &BTreeSet<ReloadSource>, changed: &BTreeSet<ReloadSource>) {
        let started = Instant::now();
        let before = self.files.clone();
        let old = self.outcomes.clone();
        for &what in due {
            let error = self.read(what, &before).err().map(|error| format!("{error:#}"));
            self.outcomes.entry(what).or_default().errors = error.into_iter().collect();
        }
        self.read_live();
        let own = match &self.files.config().identity {
            Identity::Files(files) if due.contains(&ReloadSource::Certificates) => {
                Some(IdentityMaterial::load(files))
            }
            _ => None,
        };
        let is_same = self.files.are_joined_as(&before);
        let mut inputs = (!is_same).then(|| self.files.clone().join());
        let of_live = inputs.as_mut().map(|inputs| mem::take(&mut inputs.of_live));
        let in_force = self.app.config.load_full();
        if let Err(error) = self.apply(Some(&in_force), inputs, own) {
            let outcome = self.outcomes.entry(ReloadSource::Certificates).or_default();
            if !outcome.errors.contains(&error) {
                outcome.errors.push(error);
            }
        }
        self.record(&old, changed);
        if let Some((live, contents)) = self.live.as_ref().zip(self.files.live.as_ref()) {
            self.app.status.clear_pending(self.live_condition());
            let [joined, old] = &mut self.judged;
            let closed: Vec<_> =
                self.app.listeners.closed().with(Severity::Warning).cloned().collect();
            let is_joined = of_live.is_some();
            if is_joined || closed != *old {
                (*joined, *old) = (of_live.unwrap_or_else(|| mem::take(joined)), closed);
                live.judge(contents, joined, old);
            }
        }
        self.took = started.elapsed();
    }

    /// Takes the newest objects of an API server, once it has listed all kinds.
    fn read_live(&mut self) {
        let Some(live) = &self.live else { return };
        let version = live.version();
        if version == self.live_read.0 {
            return;
        }
        self.live_read = (version, Instant::now());
        match live.contents() {
            Some(contents) => self.files.live = Some(Arc::new(contents)),
            None => self.app.status.missing(self.live_condition(), live.missing()),
        }
        live.report_hold(&self.app.status, &self.app.data_path.metrics);
        self.app.status.objects_cache.lock().restored = live.restored();
    }

    /// Returns the condition of readiness that the objects of an API server fulfil.
    fn live_condition(&self) -> &'static str {
        match self.files.config().discovery {
            Discovery::Kubernetes(_) => DISCOVERY,
            _ => OBJECTS,
        }
    }

    /// Reads a source, unless its content was read with the configuration, which comes first.
    fn read(&mut self, what: ReloadSource, before: &Files) -> anyhow::Result<()> {
        let files = &mut self.files;
        match what {
            ReloadSource::Config => self.read_config()?,
            ReloadSource::Mesh => {
                if let Discovery::File(MeshFile { path }) = &files.config().discovery {
                    files.mesh = Arc::new(xds::file::load(path)?);
                }
            }
            ReloadSource::Objects if Arc::ptr_eq(&files.objects, &before.objects) => {
                files.objects = Arc::new(objects::load(&files.config().exposure.files)?);
            }
            ReloadSource::Certificates if Arc::ptr_eq(&files.trust, &before.trust) => {
                files.trust = Arc::new(PeerTrust::load(&files.config().trust)?);
            }
            ReloadSource::Objects | ReloadSource::Certificates => {}
        }
        Ok(())
    }

    /// Reads the configuration, and the files of its sections that differ.
    fn read_config(&mut self) -> anyhow::Result<()> {
        let examined = self.source.examine();
        self.files_of_rejected = named_files(&examined);
        let seen = &self.triggers.seen;
        let new = self.files_of_rejected.iter().filter(|file| !seen.contains_key(*file));
        let mut new = fingerprints(new);
        self.files = self.files.with_config(self.source.path(), examined)?;
        // Those of a rejected configuration stay unseen: the next pass examines it again, in case
        // that one of them appeared meanwhile.
        self.triggers.seen.append(&mut new);
        self.files_of_rejected.clear();
        Ok(())
    }

    /// Applies the contents of the files, as far as they differ from what is in force: nothing at
    /// the start. The inputs are their join, if that differs.
    ///
    /// # Errors
    /// The mistakes in certificates that are not used, one line each.
    fn apply(
        &mut self,
        in_force: Option<&Config>,
        inputs: Option<Inputs>,
        own: Option<Result<IdentityMaterial, TlsError>>,
    ) -> Result<(), String> {
        let used = self.certificates.lock().apply(own, &self.files.trust);
        match inputs {
            Some(inputs) => self.publish(in_force, inputs),
            None => {
                // Files of issuers define clusters; few changes of certificates affect them.
                let set = trust::set(self.files.config(), &self.files.trust);
                if *self.app.data_path.reader.load().trust != set {
                    self.app.publisher.update(Change { trust: Some(set), ..Change::default() });
                }
            }
        }
        // After the snapshot update, which contains the targets of a new listener.
        self.app.listeners.apply(&self.app.config.load());
        used
    }

    fn publish(&mut self, in_force: Option<&Config>, inputs: Inputs) {
        let app = &self.app;
        let new = &inputs.config;
        if in_force.is_some_and(|old| old.log.level != new.log.level) {
            // The level was already parsed, so this cannot fail.
            let _ = self.log.configure(&new.log.level);
        }
        let metrics = &app.data_path.metrics;
        metrics.access.set(new.log.access);
        metrics.set_link_budgets(new.links.as_deref(), &new.gateway.cluster);
        metrics.set_config_hash(config_hash(new));
        let pod = self.source.who(new);
        let position = in_force.is_none().then(|| traffic::position(new, Some(&pod)));
        let change = Change { position, ..inputs.change(in_force) };
        // Before the snapshot update, whose generation causes open tunnels to be evaluated with
        // them.
        let listeners = app.listeners.update_in_place(new);
        app.publisher.update(Change { listeners, ..change });
        app.config.store(Arc::new(inputs.config));
        *app.status.conflicts.lock() = inputs.conflicts;
        let known: HashSet<_> = self.findings.0.iter().collect();
        let warnings = inputs.findings.with(Severity::Warning);
        for warning in warnings.filter(|one| !known.contains(one)) {
            warn!("{warning}");
        }
        self.findings = inputs.findings;
        self.files = inputs.files;
    }

    /// Completes the outcomes, and reports those that differ from the old ones or are of a source
    /// with a changed file.
    fn record(&mut self, old: &BTreeMap<ReloadSource, Outcome>, changed: &BTreeSet<ReloadSource>) {
        let closed = self.app.listeners.closed();
        let file = self.source.path().display();
        let restart_only = self.files.restart_only.iter().map(|key| {
            format!("{file}: `{key}` needs a restart; the value of the start stays in use")
        });
        let closed = |severity| {
            let closed = closed.with(severity);
            closed.map(|finding| format!("{}: {}", finding.place, finding.what))
        };
        let of_config = closed(Severity::Error).chain(restart_only).collect();
        let skipped = self.findings.with(Severity::PassedOver).map(ToString::to_string);
        let of_objects = skipped.chain(closed(Severity::Warning)).collect();
        self.outcomes.entry(ReloadSource::Config).or_default().left = of_config;
        self.outcomes.entry(ReloadSource::Objects).or_default().left = of_objects;
        for (&what, outcome) in &self.outcomes {
            let old = old.get(&what).cloned().unwrap_or_default();
            if *outcome != old || changed.contains(&what) {
                self.report(what, &old, outcome, changed.contains(&what));
            }
        }
    }

    fn report(&self, what: ReloadSource, old: &Outcome, new: &Outcome, is_changed: bool) {
        let App { data_path, status, .. } = &self.app;
        let (label, left, is_usable) = (what.label(), new.left.join("\n"), new.errors.is_empty());
        if !is_usable && (is_changed || new.errors != old.errors) {
            let error = new.errors.join("\n");
            error!(
                what = label, %error,
                "cannot apply changed file; the previous state stays in use"
            );
            data_path.metrics.reload(what, false);
            status.set_reload(what, Err(error));
        }
        // Only what is new: objects of an API server change without an operator.
        let added = new.left.iter().filter(|line| is_changed || !old.left.contains(line));
        let added: Vec<_> = added.take(LINES_MAX).map(String::as_str).collect();
        if !added.is_empty() {
            error!(what = label, error = %added.join("\n"), "file applied in part");
        }
        if is_usable {
            data_path.metrics.reload(what, left.is_empty());
            if left.is_empty() {
                info!(what = label, "reloaded");
            }
            status.set_reload(what, Ok(Some(left).filter(|left| !left.is_empty())));
        }
    }
}

/// Returns the files of each kind that the configuration in use names.
fn files(config: &Config, what: ReloadSource) -> Vec<PathBuf> {
    match what {
        ReloadSource::Config => with_contents(slice::from_ref(&config.file)),
        ReloadSource::Mesh => match &config.discovery {
            Discovery::File(MeshFile { path }) => vec![path.clone()],
            Discovery::Kubernetes(_) | Discovery::Istio(_) | Discovery::Envoy(_) => Vec::new(),
        },
        ReloadSource::Objects => with_contents(&config.exposure.files),
        ReloadSource::Certificates => {
            let own = match &config.identity {
                Identity::Files(own) => vec![&own.chain, &own.key, &own.roots],
                // Read again for each certificate.
                Identity::IstioCa(_) | Identity::Spiffe(_) => Vec::new(),
            };
            let all = own.into_iter().chain(config.trust.files());
            all.cloned().collect()
        }
    }
}

/// Returns the files that a configuration names, whether it is in use or not.
pub(super) fn named_files(examined: &Examined) -> Vec<PathBuf> {
    let paths = examined.named.iter().map(|(path, _)| path.clone());
    with_contents(&paths.collect::<Vec<_>>())
}

/// Returns the paths, and the files in those that are directories.
pub(super) fn with_contents(paths: &[PathBuf]) -> Vec<PathBuf> {
    let files = paths.iter().flat_map(|path| yaml_files(path).unwrap_or_default());
    files.chain(paths.iter().cloned()).collect()
}

/// Returns the fingerprints of the files.
pub(super) fn fingerprints<'a>(files: impl IntoIterator<Item = &'a PathBuf>) -> Fingerprints {
    let prints = files.into_iter().map(|file| (file.clone(), fingerprint(file)));
    // By a vector, so that there is one instance of the map's sort.
    Vec::from_iter(prints).into_iter().collect()
}

/// Returns a hash of a configuration, by which replicas are compared.
fn config_hash(config: &Config) -> u64 {
    let mut hasher = DefaultHasher::new();
    serde_json::to_string(config).unwrap_or_default().hash(&mut hasher);
    hasher.finish()
}

/// Returns a hash of the content that detects changes. It protects nothing, so a plain hash
/// suffices.
fn fingerprint(file: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    let hashed = file.metadata().and_then(|metadata| {
        if metadata.is_file() {
            // A larger file is rejected, so the rest is not needed.
            let (mut bytes, limit) = (Vec::new(), FILE_BYTES_MAX as u64 + 1);
            File::open(file)?.take(limit).read_to_end(&mut bytes)?;
            bytes.hash(&mut hasher);
        } else if metadata.is_dir() {
            yaml_files(file)?.hash(&mut hasher);
        }
        // Reading a pipe would take the data from the loader, or block.
        Ok(())
    });
    hashed.map_err(|error| error.kind()).hash(&mut hasher);
    hasher.finish()
}
