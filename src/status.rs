//! What people look at: readiness, certificates, the last reload of each source, and what a
//! workload is called.
//!
//! Plain structs behind one lock each. Whoever knows something writes it here, the admin pages
//! read it, and nothing in the data path waits for either.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// What metrics and logs say of a workload. Empty is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct WorkloadLabels {
    /// The workload's name, such as the Deployment's.
    pub workload: String,
    /// Its namespace.
    pub namespace: String,
    /// Its SPIFFE identity as the source of the mesh claims it.
    pub principal: String,
    /// The cluster that it runs in.
    pub cluster: String,
    /// `service.istio.io/canonical-name`.
    pub canonical_name: String,
    /// `service.istio.io/canonical-revision`.
    pub canonical_revision: String,
    /// The region that it runs in.
    pub region: String,
    /// The zone that it runs in.
    pub zone: String,
}

/// A source that is read at the start and again whenever it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum What {
    /// `strait.yaml`.
    Config,
    /// The mesh, as discovery tells it.
    Mesh,
    /// Our own certificates and the roots of the trust domains.
    Certificates,
}

impl What {
    /// Every source, in the order of the enum. Metrics are created from it.
    pub const ALL: [Self; 3] = [Self::Config, Self::Mesh, Self::Certificates];

    /// The metric label and the name in dumps.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Mesh => "mesh",
            Self::Certificates => "certificates",
        }
    }
}

/// The last reload of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reload {
    /// When it was tried.
    pub at: SystemTime,
    /// Whether what was read is now in use; if not, the last good one stays.
    pub ok: bool,
    /// Why it is not in use.
    pub error: Option<String>,
}

/// An identity that we serve with, and what proves it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certificate {
    /// The SPIFFE identity.
    pub identity: String,
    /// `Available`, `Initializing` or `Unavailable: …`, as istioctl shows it; where the next
    /// certificate cannot be had, `Available: …` says so.
    pub state: String,
    /// The leaf and the intermediates above it.
    pub chain: Vec<CertificateInfo>,
    /// The roots that peers are verified against.
    pub roots: Vec<CertificateInfo>,
}

/// One certificate of a chain or of a set of roots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateInfo {
    /// The certificate as PEM.
    pub pem: String,
    /// The serial number as a decimal or hexadecimal string.
    pub serial: String,
    /// The start of its validity in RFC 3339.
    pub valid_from: String,
    /// The end of its validity in RFC 3339.
    pub expires: String,
}

/// What the process knows of itself; share it in an `Arc`.
#[derive(Debug)]
pub struct Status {
    pending: Mutex<Vec<&'static str>>,
    certificates: Mutex<BTreeMap<String, Certificate>>,
    reloads: Mutex<BTreeMap<What, Reload>>,
}

impl Status {
    /// A process that is not ready until each of `pending` is.
    pub fn new(pending: &[&'static str]) -> Self {
        Self {
            pending: Mutex::new(pending.to_vec()),
            certificates: Mutex::default(),
            reloads: Mutex::default(),
        }
    }

    /// Says that readiness no longer waits for `what`.
    pub fn ready(&self, what: &'static str) {
        lock(&self.pending).retain(|name| *name != what);
    }

    /// Says that readiness waits for `what` (again).
    pub fn pending(&self, what: &'static str) {
        let mut pending = lock(&self.pending);
        if !pending.contains(&what) {
            pending.push(what);
        }
    }

    /// What readiness waits for, in the order in which it was named; empty when ready.
    pub fn list_pending(&self) -> Vec<&'static str> {
        lock(&self.pending).clone()
    }

    /// Replaces what is known of one identity.
    pub fn set_certificate(&self, certificate: Certificate) {
        lock(&self.certificates).insert(certificate.identity.clone(), certificate);
    }

    /// Forgets an identity that we do not have any more.
    pub fn forget_certificate(&self, identity: &str) {
        lock(&self.certificates).remove(identity);
    }

    /// What is known of each identity, in their order.
    pub fn certificates(&self) -> Vec<Certificate> {
        lock(&self.certificates).values().cloned().collect()
    }

    /// Notes that `what` was read just now, and how that went.
    pub fn set_reload(&self, what: What, result: Result<(), String>) {
        let error = result.err();
        let reload = Reload {
            at: SystemTime::now(),
            ok: error.is_none(),
            error,
        };
        lock(&self.reloads).insert(what, reload);
    }

    /// The last reload of each source that was read at least once.
    pub fn reloads(&self) -> Vec<(What, Reload)> {
        lock(&self.reloads)
            .iter()
            .map(|(what, reload)| (*what, reload.clone()))
            .collect()
    }
}

/// Takes a lock. Each critical section here is one step, so data behind a poisoned lock is whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_waits_for_each_name_and_can_be_lost_again() {
        let status = Status::new(&["certificates", "mesh"]);
        status.ready("certificates");
        status.ready("never named");
        assert_eq!(status.list_pending(), ["mesh"]);
        status.ready("mesh");
        assert!(status.list_pending().is_empty());
        status.pending("mesh");
        status.pending("mesh");
        assert_eq!(status.list_pending(), ["mesh"]);
    }

    #[test]
    fn a_new_certificate_of_an_identity_replaces_the_old_one() {
        let status = Status::new(&[]);
        let certificate = |state: &str| Certificate {
            identity: "spiffe://east.local/ns/a/sa/b".into(),
            state: state.into(),
            ..Certificate::default()
        };
        status.set_certificate(certificate("Initializing"));
        status.set_certificate(certificate("Available"));
        assert_eq!(status.certificates(), [certificate("Available")]);
    }

    #[test]
    fn the_last_reload_of_a_source_says_why_it_failed() {
        let status = Status::new(&[]);
        status.set_reload(What::Mesh, Ok(()));
        status.set_reload(What::Mesh, Err("line 3: unknown key".into()));
        status.set_reload(What::Config, Ok(()));
        let reloads = status.reloads();
        let shown: Vec<_> = reloads
            .iter()
            .map(|(what, reload)| (what.label(), reload.ok, reload.error.as_deref()))
            .collect();
        assert_eq!(
            shown,
            [
                ("config", true, None),
                ("mesh", false, Some("line 3: unknown key"))
            ]
        );
    }
}
