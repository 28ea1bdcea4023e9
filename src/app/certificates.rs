//! The certificate in use, from files or from an authority, and its status.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::config::{Config, Identity, Source, pod};
use crate::datapath::Gateway;
use crate::snapshot::Publisher;
use crate::status::{Certificate, Status};
use crate::tls::issue::cache::Cache;
use crate::tls::issue::istio::Authority;
use crate::tls::issue::{News, workload_api};
use crate::tls::{self, Crls, Material, PeerTrust, Served, TlsError, TrustedDomain};

use super::CERTIFICATES;

/// Interval of clock checks. Timers do not advance while the host is suspended.
const LOOK: Duration = Duration::from_secs(60);

/// Starts the task that obtains certificates. With certificates in files the receiver never
/// returns one. `back` is notified when the control plane is reachable again.
fn source(source: &Source, config: &Config, back: Arc<Notify>) -> mpsc::Receiver<News> {
    let (news, told) = mpsc::channel(1);
    match &config.identity {
        Identity::Files(_) => {}
        Identity::IstioCa(ca) => {
            let id = source.who(config).identity(&ca.trust_domain);
            let cache = ca.cache.clone().map(|folder| Cache {
                folder,
                id: id.clone(),
                roots: ca.plane.roots.clone(),
            });
            let authority = Authority {
                plane: ca.plane.clone(),
                cluster: config.gateway.cluster.clone(),
                id,
                ttl: ca.ttl,
                cache,
                back,
            };
            tokio::spawn(authority.run(news));
        }
        Identity::Spiffe { socket } => {
            let socket = pod::workload_api(source.environment(), socket.as_deref());
            tokio::spawn(workload_api::run(socket, news));
        }
    }
    told
}

/// Certificates shared by their two writers. A task of the control path receives new certificates
/// and checks expiry. The thread that reads files may block on one of them.
#[derive(Clone)]
pub(super) struct Shared(Arc<Mutex<Certificates>>);

impl Shared {
    /// Starts the task of the control path.
    pub(super) fn new(
        certificates: Certificates,
        (source, config): (&Source, &Config),
        back: Arc<Notify>,
    ) -> Self {
        let news = self::source(source, config, back);
        let replaced = Arc::clone(&certificates.replaced);
        let shared = Self(Arc::new(Mutex::new(certificates)));
        tokio::spawn(shared.clone().run(news, replaced));
        shared
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Certificates> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs the trusted roots without a revocation list, given the certificate and the trust in
    /// use. A reload replaces both under one lock. Returns the next expiry.
    fn look_at_trust(&self) -> Option<SystemTime> {
        let mut certificates = self.lock();
        certificates.name_unlisted();
        certificates.end()
    }

    async fn run(self, mut news: mpsc::Receiver<News>, replaced: Arc<Notify>) {
        loop {
            let end = self.look_at_trust();
            tokio::select! {
                Some(news) = news.recv() => self.lock().hear(news),
                () = passes(end) => self.lock().look(),
                () = replaced.notified() => {}
            }
        }
    }
}

/// Verifies the chains of open connections again after every change of certificates or trust.
/// Connections detect a refusal through their chain, tunnels through the snapshot's generation.
pub(super) async fn recheck(gateway: Arc<Gateway>, publisher: Arc<Publisher>) {
    loop {
        gateway.tls.changed().await;
        let (gateway, publisher) = (Arc::clone(&gateway), Arc::clone(&publisher));
        // Ten thousand chains take a second.
        let rechecked = spawn_blocking(move || {
            gateway.tls.recheck(|batch| {
                for lost in batch {
                    let (reason, why) = (lost.refusal.label(), &lost.why);
                    warn!(peer = %lost.identity, reason, %why, "open connections lose trust");
                }
                publisher.reevaluate_tunnels();
            });
        });
        if let Err(error) = rechecked.await {
            error!(%error, "open connections were not judged again");
        }
    }
}

/// Waits until the clock has passed a time. Never returns without one.
async fn passes(end: Option<SystemTime>) {
    let Some(end) = end else {
        return std::future::pending().await;
    };
    while let Ok(left) = end.duration_since(SystemTime::now()) {
        sleep(left.min(LOOK)).await;
    }
}

/// Certificate in use and trust domains in use. Together they determine the configuration of new
/// handshakes.
pub(super) struct Certificates {
    gateway: Arc<Gateway>,
    status: Arc<Status>,
    material: Option<Arc<Material>>,
    trust: PeerTrust,
    /// Time of the last report of stale revocation lists.
    looked: SystemTime,
    /// Notified when the certificate or the trust is replaced.
    replaced: Arc<Notify>,
    /// Notified when there is a certificate for the first time.
    first: Option<oneshot::Sender<()>>,
    /// Own identity, or `unknown`.
    identity: String,
    /// Error of the last attempt to get a certificate, if it failed.
    failure: Option<String>,
    has_ended: bool,
    /// Domains without roots in the last warning.
    rootless: Vec<String>,
    /// Roots without a revocation list in the last warning.
    unlisted: BTreeSet<String>,
}

impl Certificates {
    /// Creates the state without a certificate; `first` announces the first one.
    pub(super) fn new(
        gateway: Arc<Gateway>,
        status: Arc<Status>,
        (from, config): (&Source, &Config),
        trust: PeerTrust,
        first: oneshot::Sender<()>,
    ) -> Self {
        let identity = match &config.identity {
            Identity::IstioCa(ca) => from.who(config).identity(&ca.trust_domain),
            Identity::Files(_) | Identity::Spiffe { .. } => "unknown".to_owned(),
        };
        let mut new = Self {
            gateway,
            status,
            material: None,
            trust,
            looked: SystemTime::UNIX_EPOCH,
            replaced: Arc::default(),
            first: Some(first),
            identity,
            failure: None,
            has_ended: false,
            rootless: Vec::new(),
            unlisted: BTreeSet::new(),
        };
        new.show();
        new.show_domains();
        new.name_stale();
        new
    }

    /// Returns the next expiry of the certificate in use or of a revocation list.
    fn end(&self) -> Option<SystemTime> {
        let crls = self.trust.crls.as_ref();
        let stale = crls.and_then(|crls| crls.next_stale(self.looked));
        self.own_end().into_iter().chain(stale).min()
    }

    fn own_end(&self) -> Option<SystemTime> {
        let material = self.material.as_ref().filter(|_| !self.has_ended);
        material.map(|material| material.identity.not_after)
    }

    fn hear(&mut self, news: News) {
        match news {
            News::Issued(material) => self.issued(material),
            News::Restored(material) => self.restored(material),
            News::Failed(why) => self.failed(why),
        }
    }

    /// Handles the expiry of the certificate in use or of a revocation list.
    fn look(&mut self) {
        if self.name_stale() {
            self.gateway.tls.recheck_soon();
        }
        if self.own_end().is_some_and(|end| end <= SystemTime::now()) {
            self.has_ended = true;
            error!(identity = self.identity, "our certificate has ended");
            self.status.pending(CERTIFICATES);
            self.show();
        }
    }

    fn issued(&mut self, material: Arc<Material>) {
        let served = tls::serve(&material, &self.trust);
        match served {
            Ok(served) => {
                self.gateway.metrics.certificate_fetched(true);
                self.replace(material, served);
            }
            Err(error) => self.failed(error.to_string()),
        }
    }

    /// Uses a certificate from the disk cache until the authority has answered.
    fn restored(&mut self, material: Arc<Material>) {
        match tls::serve(&material, &self.trust) {
            Ok(served) => {
                info!("serving with the certificate on disk");
                self.replace(material, served);
            }
            Err(error) => warn!(%error, "the certificate on disk is not used"),
        }
    }

    fn failed(&mut self, why: String) {
        self.gateway.metrics.certificate_fetched(false);
        let rest = match &self.material {
            Some(material) => {
                let end = humantime::Timestamp::from(material.identity.not_after);
                format!("the one before ends at {end}")
            }
            None => "there is none yet".to_owned(),
        };
        warn!(identity = self.identity, %why, rest, "no new certificate");
        self.failure = Some(why);
        self.show();
    }

    /// Uses a certificate for all handshakes from now on.
    pub(super) fn replace(&mut self, material: Arc<Material>, served: Served) {
        self.gateway.tls.replace(served);
        let identity = material.identity.uri.to_string();
        if identity != self.identity {
            self.status.forget_certificate(&self.identity);
        }
        let end = humantime::Timestamp::from(material.identity.not_after);
        info!(identity, expires = %end, "certificate in force");
        (self.identity, self.material) = (identity, Some(material));
        (self.failure, self.has_ended) = (None, false);
        self.show();
        self.show_ends();
        self.name_rootless();
        self.status.ready(CERTIFICATES);
        self.replaced.notify_one();
        if let Some(first) = self.first.take() {
            // The receiver may have stopped.
            let _ = first.send(());
        }
    }

    /// Returns the configuration of handshakes with this trust; none without a certificate.
    pub(super) fn served_with(&self, trust: &PeerTrust) -> Result<Option<Served>, TlsError> {
        let material = self.material.as_ref();
        material
            .map(|material| tls::serve(material, trust))
            .transpose()
    }

    /// Uses new trust, with the configuration that [`Certificates::served_with`] created from it.
    pub(super) fn trust(&mut self, trust: PeerTrust, served: Option<Served>) {
        for before in self.trust.domains.iter().filter_map(TrustedDomain::status) {
            self.status.forget_certificate(&before.identity);
        }
        (self.trust, self.looked) = (trust, SystemTime::UNIX_EPOCH);
        self.show_domains();
        self.show_ends();
        if let Some(served) = served {
            self.gateway.tls.replace(served);
        }
        self.name_rootless();
        self.name_stale();
        // The next expiry may have changed.
        self.replaced.notify_one();
    }

    /// Logs the revocation lists that became stale since the last call, and counts all lists.
    /// Returns true if there is a new stale list.
    fn name_stale(&mut self) -> bool {
        let now = SystemTime::now();
        let before = std::mem::replace(&mut self.looked, now);
        let lists = self
            .trust
            .crls
            .as_deref()
            .map_or_else(Vec::new, Crls::status);
        let stale: Vec<_> = lists
            .iter()
            .filter(|list| list.next_update <= now)
            .collect();
        let new = stale.iter().filter(|list| list.next_update > before);
        let count = new
            .inspect(|list| warn!(%list, "a revocation list is stale"))
            .count();
        let fresh = lists.len() - stale.len();
        self.gateway.metrics.crls(fresh, stale.len());
        self.gateway
            .metrics
            .validation_skipped(self.trust.skip_validation);
        self.status.set_crls(lists);
        count > 0
    }

    /// Logs the trusted domains without roots, if they have changed.
    fn name_rootless(&mut self) {
        let Some(material) = &self.material else {
            return;
        };
        let lacks = |domain: &&TrustedDomain| domain.roots_with(material).is_none();
        let rootless = self.trust.domains.iter().filter(lacks);
        let rootless: Vec<_> = rootless.map(|domain| domain.name.clone()).collect();
        if rootless != self.rootless && !rootless.is_empty() {
            warn!(
                domains = rootless.join(","),
                "the Workload API has no bundle for these trust domains: their peers are refused; \
                 federate with them, or write trust.domains[].roots"
            );
        }
        self.rootless = rootless;
    }

    /// Logs the new trusted roots for which `trust.crl` requires a list but has none.
    fn name_unlisted(&mut self) {
        let unlisted = self.trust.unlisted_roots(self.material.as_deref());
        for root in unlisted.difference(&self.unlisted) {
            warn!(
                root,
                "`trust.crl` has no list of a trusted root: peers below it are refused; add its \
                 list, or write `on_missing: accept`"
            );
        }
        self.status
            .set_unlisted_roots(unlisted.iter().cloned().collect());
        self.unlisted = unlisted;
    }

    /// Shows the roots of the trust domains that have their own.
    fn show_domains(&self) {
        for shown in self.trust.domains.iter().filter_map(TrustedDomain::status) {
            self.status.set_certificate(shown);
        }
    }

    /// Exports the expiry times of everything in use.
    fn show_ends(&self) {
        let own = self
            .material
            .iter()
            .flat_map(|material| material.expiries());
        let domains = self.trust.domains.iter();
        let domains = domains.filter_map(TrustedDomain::expiry).min();
        let crls = self.trust.crls.as_ref();
        let crls = crls.and_then(|crls| crls.next_stale(SystemTime::UNIX_EPOCH));
        let ends = own.chain(domains.map(|end| ("domain_root", end)));
        let ends = ends.chain(crls.map(|end| ("crl", end)));
        let ends: Vec<_> = ends.collect();
        self.gateway.metrics.certificates_end(&self.identity, &ends);
    }

    /// Updates the status of the own certificate.
    fn show(&self) {
        let mut shown = match &self.material {
            Some(material) => material.status(),
            None => Certificate {
                identity: self.identity.clone(),
                ..Certificate::default()
            },
        };
        shown.state = match (&self.material, &self.failure) {
            (None, None) => "Initializing".to_owned(),
            (Some(_), None) if !self.has_ended => "Available".to_owned(),
            (Some(_), Some(why)) if !self.has_ended => {
                format!("Available: no new certificate: {why}")
            }
            (_, Some(why)) => format!("Unavailable: {why}"),
            (Some(_), None) => "Unavailable: the certificate has ended".to_owned(),
        };
        self.status.set_certificate(shown);
    }
}
