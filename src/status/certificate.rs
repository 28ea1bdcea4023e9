//! State of the certificate of an identity.

use std::time::{Duration, SystemTime};

/// Identity that this gateway serves with, and its certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certificate {
    /// SPIFFE identity, or `trust domain NAME` for a trust domain with its own roots.
    pub identity: String,
    /// `Available`, `Initializing` or `Unavailable: …`, as istioctl shows it. `Available: …` if
    /// no new certificate could be obtained.
    pub state: String,
    pub chain: Vec<CertificateInfo>,
    /// Roots that peers are verified against.
    pub roots: Vec<CertificateInfo>,
    /// Start of the leaf's validity, and first expiry of a certificate on its path to the roots.
    pub validity: Option<(SystemTime, SystemTime)>,
    /// Time since which no new certificate could be obtained.
    pub failing_since: Option<SystemTime>,
}

impl Certificate {
    /// Returns the problem with its renewal, if any: less than a quarter of the lifetime is left,
    /// or renewals have failed for a tenth of it.
    pub fn renewal_problem(&self, now: SystemTime) -> Option<String> {
        let (start, end) = self.validity?;
        let lifetime = end.duration_since(start).unwrap_or_default();
        let left = end.duration_since(now).unwrap_or_default();
        let failing = self.failing_since;
        let failing = failing.and_then(|since| now.duration_since(since).ok());
        if left < lifetime / 4 {
            let left = humantime::format_duration(Duration::from_secs(left.as_secs()));
            Some(format!("expires in {left}, less than a quarter of its lifetime"))
        } else if failing.is_some_and(|failing| failing >= lifetime / 10) {
            let failing = failing.map_or(0, |failing| failing.as_secs());
            let failing = humantime::format_duration(Duration::from_secs(failing));
            Some(format!("was not renewed for {failing}, a tenth of its lifetime"))
        } else {
            None
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateInfo {
    pub pem: String,
    /// Serial number in decimal.
    pub serial: String,
    /// Start of the validity, RFC 3339.
    pub valid_from: String,
    /// End of the validity, RFC 3339.
    pub expires: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn the_last_quarter_and_a_tenth_of_failed_renewals_are_problems() {
        let start = SystemTime::UNIX_EPOCH;
        let problem = |now: Duration, failing: Option<Duration>| {
            let certificate = Certificate {
                validity: Some((start, start + 24 * HOUR)),
                failing_since: failing.map(|since| start + since),
                ..Certificate::default()
            };
            certificate.renewal_problem(start + now)
        };
        let minute = HOUR / 60;
        assert_eq!(problem(18 * HOUR, None), None);
        let last = problem(18 * HOUR + minute, None).unwrap_or_default();
        assert_eq!(last, "expires in 5h 59m, less than a quarter of its lifetime");
        // Renewed from half of the lifetime on.
        let since = Some(12 * HOUR);
        assert_eq!(problem(12 * HOUR, since), None);
        assert_eq!(problem(14 * HOUR + 23 * minute, since), None);
        let failed = problem(14 * HOUR + 24 * minute, since).unwrap_or_default();
        assert_eq!(failed, "was not renewed for 2h 24m, a tenth of its lifetime");
        assert_eq!(Certificate::default().renewal_problem(start), None);
    }
}
