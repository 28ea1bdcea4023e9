//! The certificate in use, from files or from an authority, and its status.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::config::{Config, Identity, Source, pod};
use crate::datapath::DataPath;
use crate::snapshot::Publisher;
use crate::status::{Certificate, Status};
use crate::tls::issue::cache::Cache;
use crate::tls::issue::istio::IstioAuthority;
use crate::tls::issue::{CertificateEvent, RenewalSignals, workload_api};
use crate::tls::{self, Crls, IdentityMaterial, PeerTrust, TlsError, TrustedDomain};

use super::state::App;
use super::supervise::spawn_task;

/// Condition of readiness: there is a valid certificate.
pub(super) const CERTIFICATES: &str = "certificates";

/// Interval at which the certificate in use is verified again. Timers do not advance while the host
/// is suspended, and its clock may be set.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Resolution of the times in certificates. One is valid until the end of its last second.
const SECOND: Duration = Duration::from_secs(1);

/// Starts the task that obtains certificates. With certificates in files the receiver never
/// returns one.
fn start_issuance(
    source: &Source,
    config: &Config,
    (signals, status): (RenewalSignals, &Arc<Status>),
) -> mpsc::Receiver<CertificateEvent> {
    let (news, receiver) = mpsc::channel(1);
    if let Some(requests) = requests(source, config, signals, news) {
        spawn_task((&Handle::current(), status), "certificate requests", requests);
    }
    receiver
}

/// Requests one certificate, as at the start, and stores it nowhere. None with certificates in
/// files.
pub async fn request_certificate(
    source: &Source,
    mut config: Config,
) -> Option<Result<Arc<IdentityMaterial>, String>> {
    if let Identity::IstioCa(ca) = &mut config.identity {
        ca.cache = None;
    }
    let (news, mut receiver) = mpsc::channel(1);
    let requests = requests(source, &config, RenewalSignals::default(), news)?;
    let first = tokio::select! {
        first = receiver.recv() => first,
        () = requests => None,
    };
    Some(match first {
        Some(CertificateEvent::Issued(own, _) | CertificateEvent::Restored(own)) => Ok(own),
        Some(CertificateEvent::Failed(why)) => Err(why),
        None => Err("no answer".to_owned()),
    })
}

/// Returns the task that obtains certificates; none with certificates in files.
fn requests(
    source: &Source,
    config: &Config,
    signals: RenewalSignals,
    news: mpsc::Sender<CertificateEvent>,
) -> Option<Pin<Box<dyn Future<Output = ()> + Send>>> {
    match &config.identity {
        Identity::Files(_) => None,
        Identity::IstioCa(ca) => {
            let id = source.who(config).identity(&ca.trust_domain);
            let cache = ca.cache.clone();
            let cache = cache.map(|it| Cache::new(it, id.clone(), ca.plane.roots.clone()));
            let authority = IstioAuthority {
                plane: ca.plane.clone(),
                cluster: config.gateway.cluster.clone(),
                id,
                ttl: ca.ttl,
                cache,
                signals,
            };
            Some(Box::pin(authority.run(news)))
        }
        Identity::Spiffe(api) => {
            let socket = pod::workload_api(source.environment(), api.socket.as_deref());
            Some(Box::pin(workload_api::run(socket, news, signals.unusable)))
        }
    }
}

/// Certificates shared by their two writers. A task of the control path receives new certificates
/// and checks expiry. The thread that reads files may block on one of them.
pub(super) type SharedCertificates = Arc<Mutex<Certificates>>;

/// Starts the management of the certificate in use, from files or from an authority. `first`
/// announces the first certificate.
pub(super) fn start(app: &App, source: &Source, first: oneshot::Sender<()>) -> SharedCertificates {
    let config = app.config.load();
    let (data_path, publisher) = (Arc::clone(&app.data_path), Arc::clone(&app.publisher));
    let own = (&Handle::current(), &app.status);
    spawn_task(own, "certificate checks", recheck(data_path, publisher));
    let certificates = Certificates::new(app, source, first);
    let signals = RenewalSignals {
        reachable: Arc::clone(&app.reconnected),
        unusable: Arc::clone(&certificates.unusable),
    };
    let news = start_issuance(source, &config, (signals, &app.status));
    let replaced = Arc::clone(&certificates.replaced);
    let shared = Arc::new(Mutex::new(certificates));
    spawn_task(own, "certificates", run(Arc::clone(&shared), news, replaced));
    shared
}

async fn run(
    shared: SharedCertificates,
    mut news: mpsc::Receiver<CertificateEvent>,
    replaced: Arc<Notify>,
) {
    loop {
        let wait = shared.lock().check();
        tokio::select! {
            Some(news) = news.recv() => shared.lock().handle_news(news),
            () = sleep(wait) => {}
            () = replaced.notified() => {}
        }
    }
}

/// Verifies the chains of open connections again after every change of certificates or trust.
/// Connections detect a refusal through their chain, tunnels through the snapshot's generation.
async fn recheck(data_path: Arc<DataPath>, publisher: Arc<Publisher>) {
    loop {
        data_path.tls.recheck.notified().await;
        let (data_path, publisher) = (Arc::clone(&data_path), Arc::clone(&publisher));
        // Ten thousand chains take a second.
        let rechecked = spawn_blocking(move || {
            data_path.tls.recheck(|batch| {
                for lost in batch {
                    let (reason, error) = (lost.refusal.label(), &lost.cause);
                    warn!(
                        peer = %lost.identity, reason, %error,
                        "open connections are no longer trusted"
                    );
                }
                publisher.reevaluate_tunnels();
            });
        });
        if let Err(error) = rechecked.await {
            error!(%error, "cannot recheck open connections");
        }
    }
}

/// Certificate in use and trust domains in use. Together they determine the configuration of new
/// handshakes.
pub(super) struct Certificates {
    data_path: Arc<DataPath>,
    status: Arc<Status>,
    material: Option<Arc<IdentityMaterial>>,
    trust: Arc<PeerTrust>,
    /// Time of the last report of stale revocation lists.
    stale_checked_at: SystemTime,
    /// Notified when the certificate or the trust is replaced.
    replaced: Arc<Notify>,
    /// Notified when the certificate in use becomes unusable, or the restored one is.
    unusable: Arc<Notify>,
    /// Notified when there is a certificate for the first time.
    first_certificate: Option<oneshot::Sender<()>>,
    /// Own identity, or `unknown`.
    identity: String,
    /// Error of the last attempt to get a certificate, if it failed, and the time of the first
    /// failure since the last success.
    failure: Option<(String, SystemTime)>,
    /// Refusal of the certificate in use that peers would answer with now.
    refused: Option<String>,
    /// Domains without roots in the last warning.
    domains_without_roots: Vec<String>,
    /// Roots without a revocation list in the last warning.
    roots_without_crl: BTreeSet<String>,
}

impl Certificates {
    /// Creates the state without a certificate and without trust.
    fn new(app: &App, source: &Source, first: oneshot::Sender<()>) -> Self {
        let config = app.config.load();
        let identity = match &config.identity {
            Identity::IstioCa(ca) => source.who(&config).identity(&ca.trust_domain),
            Identity::Files(_) | Identity::Spiffe(_) => "unknown".to_owned(),
        };
        Self {
            data_path: Arc::clone(&app.data_path),
            status: Arc::clone(&app.status),
            material: None,
            trust: Arc::default(),
            stale_checked_at: SystemTime::UNIX_EPOCH,
            replaced: Arc::default(),
            unusable: Arc::default(),
            first_certificate: Some(first),
            identity,
            failure: None,
            refused: None,
            domains_without_roots: Vec::new(),
            roots_without_crl: BTreeSet::new(),
        }
    }

    /// Verifies the certificate and the revocation lists in use. Returns the time until one of them
    /// expires, if that is before the next check. A reload replaces both under one lock.
    fn check(&mut self) -> Duration {
        self.report_roots_without_crl();
        if self.report_stale_crls() {
            self.data_path.tls.recheck.notify_one();
        }
        self.verify_own();
        let now = SystemTime::now();
        let own = self.material.as_ref().map(|material| material.valid_until + SECOND);
        let stale = self.trust.crls.as_ref().and_then(|crls| crls.next_stale(now));
        let ends = own.into_iter().chain(stale);
        let left =
            ends.filter_map(|end| end.duration_since(now).ok()).filter(|left| !left.is_zero());
        left.min().map_or(CHECK_INTERVAL, |left| left.min(CHECK_INTERVAL))
    }

    /// Verifies the certificate in use as a peer would now. Readiness ends while it is refused.
    fn verify_own(&mut self) {
        let crls = self.trust.crls.as_deref();
        let material = self.material.as_ref();
        let verified = material.map(|material| material.verify(crls, SystemTime::now()));
        let refused = verified.and_then(|verified| verified.err()).map(|error| error.to_string());
        let identity = &self.identity;
        match &refused {
            Some(error) if self.refused != refused => {
                error!(identity, error, "peers would refuse the certificate in force");
            }
            None if self.refused.is_some() => {
                info!(identity, "the certificate in force is valid again");
            }
            _ => {}
        }
        if refused.is_some() && self.refused.is_none() {
            self.unusable.notify_one();
        }
        if refused.is_some() {
            self.status.pending(CERTIFICATES);
        } else if self.material.is_some() {
            self.status.clear_pending(CERTIFICATES);
        }
        self.refused = refused;
        self.update_status();
    }

    fn handle_news(&mut self, news: CertificateEvent) {
        let (material, in_force) = match news {
            CertificateEvent::Issued(material, in_force) => (material, Some(in_force)),
            CertificateEvent::Restored(material) => (material, None),
            CertificateEvent::Failed(error) => return self.fetch_failed(error),
        };
        let replaced = if self.material.as_ref().is_some_and(|known| known.is_same(&material)) {
            // An agent sends its certificate again on each stream.
            self.clear_failure();
            self.update_status();
            Ok(())
        } else {
            let accepted = self.accepts(&material, self.trust.crls.as_deref());
            accepted.and_then(|()| self.replace(Some(Arc::clone(&material)), None))
        };
        match (replaced, in_force) {
            (Ok(()), None) => info!("serving with the certificate on disk"),
            (Ok(()), Some(in_force)) => {
                self.data_path.metrics.certificate_fetched(true);
                // One in force that peers refuse, and that is sent again, is no answer.
                if self.refused.is_none() {
                    // The source may have stopped.
                    let _ = in_force.send(());
                }
            }
            (Err(error), None) => {
                warn!(%error, "the certificate on disk is not used");
                self.unusable.notify_one();
            }
            (Err(error), Some(_)) => {
                self.use_roots_of(&material);
                self.fetch_failed(error.to_string());
            }
        }
    }

    /// Uses the roots that came with a refused certificate for the one in use, if that is valid
    /// below them: removed roots do not stay in force.
    fn use_roots_of(&mut self, refused: &IdentityMaterial) {
        let Some(known) = &self.material else {
            return;
        };
        let Ok(own) = known.with_roots_of(refused, SystemTime::now()) else {
            return;
        };
        if !known.is_same(&own)
            && let Err(error) = self.replace(Some(Arc::new(own)), None)
        {
            warn!(%error, "cannot use the roots of a refused certificate");
        }
    }

    fn fetch_failed(&mut self, error: String) {
        self.data_path.metrics.certificate_fetched(false);
        let current = match &self.material {
            Some(material) => {
                let end = humantime::Timestamp::from(material.valid_until);
                format!("expires at {end}")
            }
            None => "none".to_owned(),
        };
        warn!(identity = self.identity, %error, current, "cannot obtain a new certificate");
        self.failed(error);
    }

    /// Records that a new certificate could not be obtained or is not usable. The last one stays in
    /// force.
    fn failed(&mut self, error: String) {
        let since = self.failure.as_ref().map(|(_, since)| *since);
        self.failure = Some((error, since.unwrap_or_else(SystemTime::now)));
        self.data_path.metrics.certificate_failing.set(true.into());
        self.update_status();
    }

    fn clear_failure(&mut self) {
        self.failure = None;
        self.data_path.metrics.certificate_failing.set(false.into());
    }

    /// Uses what was read from files, as far as it differs from what is in use. A mistake in the
    /// own certificate does not keep the trust from being used, such as a revocation list.
    ///
    /// # Errors
    /// The mistakes in what is not used, one line each.
    pub(super) fn apply(
        &mut self,
        own: Option<Result<IdentityMaterial, TlsError>>,
        trust: &Arc<PeerTrust>,
    ) -> Result<(), String> {
        let accept = |own| self.accepts(&own, trust.crls.as_deref()).map(|()| own);
        let (own, refused) = match own.map(|own| own.and_then(accept)).transpose() {
            Ok(own) => (own.filter(|own| !self.is_in_force(own)).map(Arc::new), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let is_known = Arc::ptr_eq(trust, &self.trust) || *trust == self.trust;
        let trust = (!is_known).then(|| Arc::clone(trust));
        let mut errors = Vec::new();
        if own.is_some() || trust.is_some() {
            errors.extend(self.replace(own, trust).err().map(|error| error.to_string()));
        }
        if let Some(error) = refused {
            self.failed(error.clone());
            errors.push(error);
        }
        if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
    }

    /// Verifies a certificate that is to be used. Revocation of the one in use is no reason against
    /// new roots for it, which would keep removed roots in force.
    fn accepts(&self, own: &IdentityMaterial, crls: Option<&Crls>) -> Result<(), TlsError> {
        let known = self.material.as_ref();
        let is_known = known.is_some_and(|known| known.chain == own.chain && known.key == own.key);
        own.verify(crls.filter(|_| !is_known), SystemTime::now()).map(drop)
    }

    fn is_in_force(&self, own: &IdentityMaterial) -> bool {
        let known = self.material.as_ref().filter(|_| self.failure.is_none());
        known.is_some_and(|known| known.is_same(own))
    }

    /// Uses a certificate, trust or both from now on. Nothing is served before there is a
    /// certificate.
    ///
    /// # Errors
    /// As [`tls::listener_server_config`]. What is in use stays.
    fn replace(
        &mut self,
        own: Option<Arc<IdentityMaterial>>,
        trust: Option<Arc<PeerTrust>>,
    ) -> Result<(), TlsError> {
        let new_trust = trust.as_ref().unwrap_or(&self.trust);
        let served = own.as_ref().or(self.material.as_ref());
        let served = served.map(|own| tls::listener_server_config(own, new_trust)).transpose()?;
        if let Some(trust) = trust {
            self.replace_trust(trust);
        }
        if let Some(served) = served {
            self.data_path.tls.replace(served);
        }
        if let Some(own) = own {
            self.replace_own(own);
        }
        self.export_expiry();
        self.report_domains_without_roots();
        self.verify_own();
        // The next expiry may have changed.
        self.replaced.notify_one();
        Ok(())
    }

    fn replace_own(&mut self, material: Arc<IdentityMaterial>) {
        let identity = material.identity.uri.to_string();
        if identity != self.identity {
            self.status.forget_certificate(&self.identity);
        }
        let end = humantime::Timestamp::from(material.valid_until);
        info!(identity, expires = %end, "certificate in force");
        (self.identity, self.material) = (identity, Some(material));
        self.clear_failure();
        if let Some(first) = self.first_certificate.take() {
            // The receiver may have stopped.
            let _ = first.send(());
        }
    }

    fn replace_trust(&mut self, trust: Arc<PeerTrust>) {
        for before in self.trust.domains.iter().filter_map(TrustedDomain::status) {
            self.status.forget_certificate(&before.identity);
        }
        (self.trust, self.stale_checked_at) = (trust, SystemTime::UNIX_EPOCH);
        for shown in self.trust.domains.iter().filter_map(TrustedDomain::status) {
            self.status.set_certificate(shown);
        }
        self.report_stale_crls();
    }

    /// Logs the revocation lists that became stale since the last call, and counts all lists.
    /// Returns true if there is a new stale list.
    fn report_stale_crls(&mut self) -> bool {
        let now = SystemTime::now();
        let before = std::mem::replace(&mut self.stale_checked_at, now);
        let lists = self.trust.crls.as_deref().map_or_else(Vec::new, Crls::status);
        let stale: Vec<_> = lists.iter().filter(|list| list.next_update <= now).collect();
        let new = stale.iter().filter(|list| list.next_update > before);
        let count = new.inspect(|list| warn!(%list, "a revocation list is stale")).count();
        let fresh = lists.len() - stale.len();
        self.data_path.metrics.set_crls(fresh, stale.len());
        self.data_path.metrics.validation_skipped.set(self.trust.skip_validation.into());
        *self.status.crls.lock() = lists;
        count > 0
    }

    /// Logs the trusted domains without roots, if they have changed.
    fn report_domains_without_roots(&mut self) {
        let Some(material) = &self.material else {
            return;
        };
        let lacks = |domain: &&TrustedDomain| domain.effective_roots(material).is_none();
        let rootless = self.trust.domains.iter().filter(lacks);
        let rootless: Vec<_> = rootless.map(|domain| domain.name.clone()).collect();
        if rootless != self.domains_without_roots && !rootless.is_empty() {
            warn!(
                domains = rootless.join(","),
                "the Workload API has no bundle for these trust domains: their peers are refused; \
                 federate with them, or write trust.domains[].roots"
            );
        }
        self.domains_without_roots = rootless;
    }

    /// Logs the new trusted roots for which `trust.crl` requires a list but has none.
    fn report_roots_without_crl(&mut self) {
        let unlisted = self.trust.roots_without_crl(self.material.as_deref());
        for root in unlisted.difference(&self.roots_without_crl) {
            warn!(
                root,
                "`trust.crl` has no list of a trusted root: peers below it are refused; add its \
                 list, or write `on_missing: accept`"
            );
        }
        *self.status.unlisted_roots.lock() = unlisted.iter().cloned().collect();
        self.roots_without_crl = unlisted;
    }

    /// Exports the expiry times of everything in use.
    fn export_expiry(&self) {
        let own = self.material.iter().flat_map(|material| material.expiries());
        let domains = self.trust.domains.iter().filter_map(TrustedDomain::expiry).min();
        let crls = self.trust.crls.as_ref();
        let crls = crls.and_then(|crls| crls.next_stale(SystemTime::UNIX_EPOCH));
        let ends = own.chain(domains.map(|end| ("domain_root", end)));
        let ends: Vec<_> = ends.chain(crls.map(|end| ("crl", end))).collect();
        self.data_path.metrics.set_certificate_expiry(&self.identity, &ends);
    }

    fn update_status(&self) {
        let mut shown = match &self.material {
            Some(material) => material.status(),
            None => Certificate { identity: self.identity.clone(), ..Certificate::default() },
        };
        shown.failing_since = self.failure.as_ref().map(|(_, since)| *since);
        let failure = self.failure.as_ref().map(|(why, _)| why);
        shown.state = match (&self.material, &self.refused, failure) {
            (None, _, None) => "Initializing".to_owned(),
            (None, _, Some(why)) | (Some(_), Some(why), None) => format!("Unavailable: {why}"),
            (Some(_), Some(refused), Some(why)) => {
                format!("Unavailable: {refused}; no new certificate: {why}")
            }
            (Some(_), None, None) => "Available".to_owned(),
            (Some(_), None, Some(why)) => format!("Available: no new certificate: {why}"),
        };
        let has_problem = shown.renewal_problem(SystemTime::now()).is_some();
        let is_usable = self.material.is_some() && self.refused.is_none();
        let has_failed = !is_usable && (self.material.is_some() || self.failure.is_some());
        self.data_path.metrics.renewal_problem.set((has_problem || has_failed).into());
        self.status.set_certificate(shown);
    }
}
