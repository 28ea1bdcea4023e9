//! Reload of changed files at run time. Valid content is applied immediately. Invalid content is
//! logged and counted, and the previous state stays in use.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use arc_swap::ArcSwap;
use tracing::{error, info, warn};

use crate::config::{Config, Discovery, Examined, Identity, Listener, Log, Source};
use crate::datapath::Gateway;
use crate::snapshot::Publisher;
use crate::snapshot::builder::Change;
use crate::status::{Status, What};
use crate::telemetry::LogHandle;
use crate::tls::{self, Material, PeerTrust};
use crate::watch::FileWatcher;
use crate::xds::{self, objects::contents};
use crate::yaml::FILE_BYTES_MAX;

use super::App;
use super::certificates::Shared;
use super::compare;
use super::inputs::{self, Report};
use super::listeners::Listeners;
use super::told::{Joined, Told};
use super::{traffic, trust};

/// Fingerprints of the files when they were last read. They are taken before the reading, so that
/// a concurrent change is found afterwards.
pub(super) type Seen = BTreeMap<PathBuf, u64>;

/// Result of the reading before the start.
pub(super) struct AtStart {
    pub(super) told: Told,
    pub(super) warnings: Vec<String>,
    /// Mistakes in objects that are skipped.
    pub(super) passed_over: Vec<String>,
    pub(super) seen: Seen,
}

/// Watches the four kinds of files and applies their changes, one at a time. It has a dedicated
/// thread, because a mount that hangs blocks it.
pub(super) struct Reloader {
    source: Source,
    config: Arc<ArcSwap<Config>>,
    gateway: Arc<Gateway>,
    status: Arc<Status>,
    publisher: Arc<Publisher>,
    listeners: Arc<Listeners>,
    log: LogHandle,
    certificates: Shared,
    seen: Seen,
    /// Content of the files of the mesh before the join with the configuration.
    told: Told,
    /// Error of the last reload of each kind that failed.
    failed: BTreeMap<What, String>,
    /// Files that a rejected configuration names: the configuration may become valid with one of
    /// them.
    named: Vec<PathBuf>,
    /// Last warnings.
    warned: HashSet<String>,
    /// Mistakes in the objects in use, which are skipped.
    passed_over: Vec<String>,
}

impl Reloader {
    pub(super) fn new(
        source: Source,
        app: &App,
        read: AtStart,
        certificates: Shared,
        log: LogHandle,
    ) -> Self {
        let config = app.config.load();
        for what in What::ALL {
            if !files(&config, what).is_empty() {
                app.status.set_reload(what, Ok(()));
            }
        }
        let mut reloader = Self {
            source,
            config: Arc::clone(&app.config),
            gateway: Arc::clone(&app.gateway),
            status: Arc::clone(&app.status),
            publisher: Arc::clone(&app.publisher),
            listeners: Arc::clone(&app.listeners),
            log,
            certificates,
            seen: read.seen,
            told: read.told,
            failed: BTreeMap::new(),
            named: Vec::new(),
            warned: read.warnings.into_iter().collect(),
            passed_over: Vec::new(),
        };
        reloader.note_objects(read.passed_over);
        reloader
    }

    pub(super) async fn run(mut self) {
        let mut files = self.files();
        let mut watcher = FileWatcher::new(&files)
            .inspect_err(|error| error!(%error, "cannot watch files; changes need a restart"))
            .ok();
        loop {
            // Also before the first event: a file may have changed before it was watched.
            if watcher.is_some() && self.apply_changes(false) {
                // A file that changed between its fingerprint and its reading has an outdated
                // fingerprint. A change back to the old content would then be missed.
                self.apply_changes(true);
            }
            let now = self.files();
            if now == files {
                match &mut watcher {
                    Some(watcher) => watcher.changed().await,
                    None => return,
                }
                continue;
            }
            if let Some(Err(error)) = watcher.as_mut().map(|watcher| watcher.replace(&now)) {
                warn!(%error, "cannot watch other files; their changes go unseen");
            }
            files = now;
        }
    }

    /// Returns all files whose changes matter.
    fn files(&self) -> Vec<PathBuf> {
        let config = self.config.load();
        let in_force = What::ALL.iter().flat_map(|&what| files(&config, what));
        let all: BTreeSet<_> = in_force.chain(self.named.iter().cloned()).collect();
        all.into_iter().collect()
    }

    /// Reloads the changed sources, and returns true if there were any. Sources that failed
    /// before are tried again after every change, because they may depend on it: a root on its
    /// file, a configuration on a file that it names. `again` is true right after another reload,
    /// which may have read the same changes.
    fn apply_changes(&mut self, again: bool) -> bool {
        let files = self.files();
        let now = fingerprints(&files);
        let is_new = |(file, print): &(&PathBuf, &u64)| self.seen.get(*file) != Some(*print);
        let changed = now.iter().filter(is_new).map(|(file, _)| file.clone());
        let changed: BTreeSet<_> = changed.collect();
        self.seen = now;
        if changed.is_empty() {
            return false;
        }
        let config = self.config.load_full();
        let has_changed = |what| {
            let mut own = self::files(&config, what).into_iter();
            own.any(|file| changed.contains(&file))
        };
        let is_due = |what: &What| has_changed(*what) || self.failed.contains_key(what);
        let is_news = |what| !again && has_changed(what);
        let mut due: Vec<_> = What::ALL.into_iter().filter(is_due).collect();
        loop {
            let tried = due.len();
            let mut failures = Vec::new();
            for what in std::mem::take(&mut due) {
                match self.reload(what) {
                    Ok(left) if left.is_empty() => self.succeeded(what),
                    Ok(left) => self.succeeded_in_part(what, left.join("\n"), is_news(what)),
                    Err(error) => failures.push((what, format!("{error:#}"))),
                }
            }
            if failures.is_empty() || failures.len() == tried {
                for (what, error) in failures {
                    self.failed(what, error, is_news(what));
                }
                return true;
            }
            due.extend(failures.into_iter().map(|(what, _)| what));
        }
    }

    fn succeeded(&mut self, what: What) {
        info!(what = what.label(), "reloaded");
        self.failed.remove(&what);
        self.gateway.metrics.reload(what, true);
        self.status.set_reload(what, Ok(()));
    }

    /// Reports a failure, unless it repeats the last one and `is_news` is false.
    fn failed(&mut self, what: What, error: String, is_news: bool) {
        if self.failed.get(&what) == Some(&error) && !is_news {
            return;
        }
        error!(
            what = what.label(), %error,
            "a changed file cannot be used; what was loaded before stays in force"
        );
        self.gateway.metrics.reload(what, false);
        self.status.set_reload(what, Err(error.clone()));
        self.failed.insert(what, error);
    }

    /// Reports the parts of a source that are not in use. They are tried again after every
    /// change; objects only after a change of theirs, as they depend on nothing else.
    fn succeeded_in_part(&mut self, what: What, left: String, is_news: bool) {
        if self.failed.get(&what) == Some(&left) && !is_news {
            return;
        }
        error!(what = what.label(), error = %left, "a file is in use, but not all of it");
        self.gateway.metrics.reload(what, false);
        self.status.set_reload_in_part(what, left.clone());
        match what {
            What::Objects => self.failed.remove(&what),
            _ => self.failed.insert(what, left),
        };
    }

    /// Reports the mistakes in objects that were read together with another file.
    fn note_objects(&mut self, passed_over: Vec<String>) {
        if passed_over == self.passed_over {
            return;
        }
        match passed_over.is_empty() {
            true => self.succeeded(What::Objects),
            false => self.succeeded_in_part(What::Objects, passed_over.join("\n"), true),
        }
        self.passed_over = passed_over;
    }

    /// Reloads a source. Returns the parts of the new state that are not in use, one line each.
    fn reload(&mut self, what: What) -> anyhow::Result<Vec<String>> {
        match what {
            What::Config => return self.reload_config(),
            What::Mesh => self.reload_mesh(),
            What::Objects => return self.reload_objects(),
            What::Certificates => self.reload_certificates(),
        }?;
        Ok(Vec::new())
    }

    fn reload_config(&mut self) -> anyhow::Result<Vec<String>> {
        let old = self.config.load_full();
        self.named = named(&self.source.examine());
        for (file, print) in fingerprints(&self.named) {
            self.seen.entry(file).or_insert(print);
        }
        let examined = self.source.examine();
        let mut report = Report::of(&examined.findings);
        let trust = report.trust(&old.file, &examined);
        let objects = report.objects(&examined.objects);
        let restart_only = examined
            .config
            .as_ref()
            .map(|new| old.restart_only_changes(new));
        let new = examined.config.map(|new| in_force(&old, new)).zip(objects);
        let new = new.map(|(new, objects)| {
            let told = Told {
                objects,
                ..self.told.clone()
            };
            let joined = told.joined(&new);
            report.warnings.extend(joined.warnings.iter().cloned());
            let files = (&joined.mesh, &joined.scope);
            report
                .warnings
                .extend(compare::run(&new, files, &told.policies));
            (new, told, joined)
        });
        report.refusal()?;
        let ((new, told, joined), trust) = new.zip(trust).context("it could not be read")?;
        let mut certificates = self.certificates.lock();
        let served = certificates.served_with(&trust)?;
        if new.log.level != old.log.level {
            let set = self.log.configure(&new.log.level);
            set.map_err(anyhow::Error::msg)?;
        }
        self.gateway.metrics.log_access(new.log.access);
        let set = trust::set(&new, &trust);
        certificates.trust(trust, served);
        drop(certificates);
        // Before the snapshot update, whose generation causes open tunnels to be evaluated with
        // them.
        let listeners = self.listeners.revise(&new);
        self.publisher.update(Change {
            direct: Some(new.listeners.iter().any(Listener::is_tls)),
            listeners,
            trust: Some(set),
            exposure: Some(inputs::exposure_table(&new)),
            names: Some(inputs::name_table(&new)),
            enforcement: Some(inputs::enforcement(&new)),
            traffic: Some(traffic::table(&new)),
            ..self.change(&new, joined)
        });
        // After the snapshot update, which contains the targets of a new listener.
        let mut left = self.listeners.apply(&new);
        let file = new.file.display();
        let keys = restart_only.unwrap_or_default().into_iter();
        left.extend(keys.map(|key| {
            format!("{file}: `{key}` needs a restart; its value of the start stays in force")
        }));
        self.told = told;
        self.config.store(Arc::new(new));
        self.named.clear();
        self.warn(report.warnings);
        self.note_objects(report.passed_over);
        Ok(left)
    }

    fn reload_mesh(&mut self) -> anyhow::Result<()> {
        let config = self.config.load_full();
        let Discovery::File { path } = config.discovery.clone() else {
            return Ok(());
        };
        let ((mesh, policies), findings) = xds::file::load(&path)?;
        let told = Told {
            mesh,
            policies,
            objects: self.told.objects.clone(),
        };
        self.apply(&config, told, Report::of(&findings).warnings);
        Ok(())
    }

    fn reload_objects(&mut self) -> anyhow::Result<Vec<String>> {
        let config = self.config.load_full();
        let (objects, findings) = xds::objects::load(&config.exposure.files)?;
        let told = Told {
            objects,
            ..self.told.clone()
        };
        let report = Report::of(&findings);
        self.apply(&config, told, report.warnings);
        self.passed_over.clone_from(&report.passed_over);
        Ok(report.passed_over)
    }

    /// Applies the new content of the mesh's files.
    fn apply(&mut self, config: &Config, told: Told, mut warnings: Vec<String>) {
        let joined = told.joined(config);
        warnings.extend(joined.warnings.iter().cloned());
        let files = (&joined.mesh, &joined.scope);
        warnings.extend(compare::run(config, files, &told.policies));
        self.publisher.update(Change {
            policies: match config.discovery {
                Discovery::File { .. } => Some(told.policies.clone()),
                Discovery::Istio { .. } | Discovery::Envoy { .. } => None,
            },
            ..self.change(config, joined)
        });
        self.told = told;
        self.warn(warnings);
    }

    /// Returns the change of the snapshot for the joined files, and publishes their conflicts in
    /// the status. A control plane provides the mesh itself.
    fn change(&self, config: &Config, joined: Joined) -> Change {
        self.status.set_conflicts(joined.conflicts);
        let network = config.gateway.network.as_str();
        Change {
            mesh: match config.discovery {
                Discovery::File { .. } => Some((joined.mesh, network.into())),
                Discovery::Istio { .. } | Discovery::Envoy { .. } => None,
            },
            scope: Some(joined.scope),
            ..Change::default()
        }
    }

    /// Logs the warnings that were not among the last ones.
    fn warn(&mut self, warnings: Vec<String>) {
        for warning in &warnings {
            if !self.warned.contains(warning) {
                warn!("{warning}");
            }
        }
        self.warned = warnings.into_iter().collect();
    }

    fn reload_certificates(&self) -> anyhow::Result<()> {
        let config = self.config.load();
        let trust = PeerTrust::load(&config.trust)?;
        let set = trust::set(&config, &trust);
        match &config.identity {
            Identity::Files(files) => {
                let material = Material::load(files)?;
                let served = tls::serve(&material, &trust)?;
                let mut certificates = self.certificates.lock();
                certificates.trust(trust, None);
                certificates.replace(Arc::new(material), served);
            }
            Identity::IstioCa(_) | Identity::Spiffe { .. } => {
                let mut certificates = self.certificates.lock();
                let served = certificates.served_with(&trust)?;
                certificates.trust(trust, served);
            }
        }
        // Files of issuers define clusters; few changes of certificates affect them.
        if *self.gateway.reader.load().trust != set {
            self.publisher.update(Change {
                trust: Some(set),
                ..Change::default()
            });
        }
        Ok(())
    }
}

/// Returns the new configuration as far as it can be applied at run time. Keys that need a
/// restart keep their old value, so that every page shows the values in use.
fn in_force(old: &Config, new: Config) -> Config {
    Config {
        trust: new.trust,
        listeners: new.listeners,
        exposure: new.exposure,
        links: new.links,
        names: new.names,
        policy: new.policy,
        traffic: new.traffic,
        log: Log {
            level: new.log.level,
            access: new.log.access,
            ..old.log.clone()
        },
        ..old.clone()
    }
}

/// Returns the files of each kind that the configuration in use names.
fn files(config: &Config, what: What) -> Vec<PathBuf> {
    match what {
        What::Config => vec![config.file.clone()],
        What::Mesh => match &config.discovery {
            Discovery::File { path } => vec![path.clone()],
            Discovery::Istio { .. } | Discovery::Envoy { .. } => Vec::new(),
        },
        What::Objects => with_contents(&config.exposure.files),
        What::Certificates => {
            let own = match &config.identity {
                Identity::Files(own) => vec![&own.chain, &own.key, &own.roots],
                // Read again for each certificate.
                Identity::IstioCa(_) | Identity::Spiffe { .. } => Vec::new(),
            };
            let all = own.into_iter().chain(config.trust.files());
            all.cloned().collect()
        }
    }
}

/// Returns the files that a configuration names, whether it is in use or not.
pub(super) fn named(examined: &Examined) -> Vec<PathBuf> {
    let paths = examined.named.iter().map(|(path, _)| path.clone());
    with_contents(&paths.collect::<Vec<_>>())
}

/// Returns the paths, and the files in those that are directories.
fn with_contents(paths: &[PathBuf]) -> Vec<PathBuf> {
    let files = paths
        .iter()
        .flat_map(|path| contents(path).unwrap_or_default());
    files.chain(paths.iter().cloned()).collect()
}

/// Returns the fingerprints of the files.
pub(super) fn fingerprints(files: &[PathBuf]) -> Seen {
    let print = |file: &PathBuf| (file.clone(), fingerprint(file));
    files.iter().map(print).collect()
}

/// Reads at most one byte more than the size limit: a larger file is rejected, so the rest is not
/// needed.
fn beginning(file: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let opened = File::open(file)?;
    opened
        .take(FILE_BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns a hash of the content that detects changes. It protects nothing, so a plain hash
/// suffices.
fn fingerprint(file: &Path) -> u64 {
    let contents = file
        .metadata()
        .and_then(|metadata| match metadata.is_file() {
            true => beginning(file),
            false if metadata.is_dir() => {
                let names = contents(file)?.into_iter().map(PathBuf::into_os_string);
                Ok(names
                    .collect::<Vec<_>>()
                    .join(OsStr::new("/"))
                    .into_encoded_bytes())
            }
            // Reading a pipe would take the data from the loader, or block.
            false => Ok(Vec::new()),
        });
    let mut hasher = DefaultHasher::new();
    contents.map_err(|error| error.kind()).hash(&mut hasher);
    hasher.finish()
}
